"""Builder of methods that a test gives, by functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from paceline.algorithms.method import BucketPlan, Method
from paceline.generation.context import GenerationContext
from paceline.reduce.buckets import Bucket

MakeMethod = Callable[[Sequence[Bucket]], Method]


class GivenBuilder:
    """Builder of a first method, and of those that follow it.

    Args:
        make: makes the first method, and that of each later generation.
        bucket_bytes: size of its buckets.
        dense: as of `BucketPlan`.
        later: for each step, the method that continues and the size of its buckets; None: the
            present one.
    """

    changes = True

    def __init__(
        self,
        make: MakeMethod,
        bucket_bytes: int,
        *,
        dense: bool = False,
        later: Iterable[tuple[MakeMethod, int] | None] = (),
    ) -> None:
        self._first = make, bucket_bytes
        self._present = make
        self._dense = dense
        self._later = iter(later)

    def plan(self, *, begins: bool) -> BucketPlan | None:
        change = self._first if begins else next(self._later, None)
        if change is None:
            return None
        self._present, bucket_bytes = change
        return BucketPlan(bucket_bytes=bucket_bytes, dense=self._dense)

    def method(self, buckets: Sequence[Bucket], context: GenerationContext) -> Method:
        return self._present(buckets)
