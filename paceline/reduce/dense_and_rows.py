"""Composition of two exchanges: dense buckets by one, row-sparse tables by the other.

index     0 … dense - 1    dense … dense + tables - 1    dense + tables
exchange  dense buckets    tables                        running statistics
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket
from paceline.reduce.exchange import Exchange
from paceline.reduce.row_exchange import RowExchange
from paceline.timeline.timeline import Timeline


def dense_of(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets that aren't row-sparse, which come first."""
    return [bucket for bucket in buckets if not bucket.row_sparse]


def with_rows(
    dense: Exchange,
    buckets: Sequence[Bucket],
    communicator: Communicator | None,
    timeline: Timeline | None = None,
) -> Exchange:
    """Return an exchange of all buckets: `dense` itself where none is row-sparse.

    Args:
        dense: exchanges `dense_of(buckets)`, and the running statistics.
        communicator: connects all ranks for rows alone; None: nothing does.
        timeline: as that of `RowExchange`.

    Raises:
        ConfigError: a bucket is row-sparse, and there is no communicator for it.
    """
    tables = [bucket for bucket in buckets if bucket.row_sparse]
    if not tables:
        return dense
    if communicator is None:
        raise ConfigError(
            f"{tables[0].names[0]} gets sparse gradients, but the model had no layer with "
            "sparse=True at parallelize(): add such layers before parallelize(), or create them "
            "with sparse=False."
        )
    rows = RowExchange([table.parameters[0] for table in tables], communicator, timeline)
    return DenseAndRows(dense, rows, len(buckets) - len(tables), len(tables))


class DenseAndRows:
    """Exchange of dense buckets, row-sparse tables and running statistics.

    Args:
        dense: exchanges the dense buckets, and the running statistics behind them.
        rows: exchanges the tables.
        dense_count: the number of dense buckets.
    """

    def __init__(self, dense: Exchange, rows: Exchange, dense_count: int, tables: int) -> None:
        self._dense = dense
        self._rows = rows
        self._first = dense_count
        self._end = dense_count + tables
        self.zero_copy = dense.zero_copy

    @property
    def traffic(self) -> Sequence[tuple[int, int]]:
        """That of both, as it is now."""
        own = self._dense.traffic
        first = self._first
        return [*own[:first], *self._rows.traffic, *own[first:]]

    def begin(self, scale: float, indices: Sequence[int] | None = None) -> None:
        """Begin both."""
        self._dense.begin(scale)
        self._rows.begin(scale)

    def send(
        self, index: int, values: Sequence[Tensor | None], weight: float, operation: str
    ) -> int:
        """Send by the bucket's exchange."""
        exchange, own = self._of(index)
        return exchange.send(own, values, weight, operation)

    def first_to_wait_for(self, index: int) -> int:
        """Ask the bucket's exchange; dense buckets have the same numbers there."""
        exchange, own = self._of(index)
        return index - own + exchange.first_to_wait_for(own)

    def wait(self, index: int, version: int) -> list[Tensor | None]:
        """Wait by the bucket's exchange."""
        exchange, own = self._of(index)
        return exchange.wait(own, version)

    def abandon(self, index: int, version: int | None) -> None:
        """Abandon by the bucket's exchange."""
        exchange, own = self._of(index)
        exchange.abandon(own, version)

    def drain(self) -> None:
        """Drain both."""
        self._dense.drain()
        self._rows.drain()

    def close(self) -> None:
        """Close both."""
        try:
            self._rows.close()
        finally:
            self._dense.close()

    def _of(self, index: int) -> tuple[Exchange, int]:
        """Return a bucket's exchange, and its number there."""
        if self._first <= index < self._end:
            return self._rows, index - self._first
        return self._dense, index if index < self._first else index - self._end + self._first
