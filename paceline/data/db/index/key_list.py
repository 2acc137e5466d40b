"""Keys by number, in one piece of memory: a million of them as a list would take 80 MB.

The keys stand one after another in `blob`, and `ends` are the offsets behind each:

    blob     000001_a000002_bb000003_c
    ends            8        17      25
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt


class KeyList:
    """Immutable sequence of keys, stored in two arrays.

    Attributes:
        blob: the bytes of all keys, one key after another.
        lengths: (keys,), the length of each key in bytes.
    """

    def __init__(self, blob: bytes, lengths: npt.NDArray[np.integer]) -> None:
        """Cut `blob` into keys of the given `lengths`, of shape (keys,)."""
        self.blob = blob
        self.lengths = lengths
        self._ends = np.cumsum(lengths, dtype=np.int64)

    @classmethod
    def of(cls, keys: Iterable[bytes]) -> KeyList:
        """Gather keys one at a time, so that they are never all there as objects."""
        blob = bytearray()

        def gather() -> Iterator[int]:
            for key in keys:
                blob.extend(key)
                yield len(key)

        lengths = np.fromiter(gather(), np.int64)
        return cls(bytes(blob), lengths)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(
                f"Record {index} doesn't exist: there are {len(self)} records, numbered from 0."
            )
        end = int(self._ends[index])
        return self.blob[end - int(self.lengths[index]) : end]
