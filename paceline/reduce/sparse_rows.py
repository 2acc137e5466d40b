"""Row-sparse gradients: the rows of a table that got a gradient, as messages and as sums.

`nn.Embedding(sparse=True)` gets a gradient of the rows that its batch used. A rank sends these rows
with their indices. Every rank adds all ranks' rows in rank order, so all get the same bits:

    rank 0   rows 2 5      rank 1   rows 5 9      sum   rows 2 5+5 9

A gradient may also be dense: a penalty on the whole table makes it so. Then all its rows are sent,
and the sum is dense, as in plain torch.

    message: (16 + capacity · (8 + row bytes),) uint8     [ kind, count | indices | values ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Kinds of gradients; a sum has the largest of its ranks' kinds.
ABSENT = 0
SPARSE = 1
DENSE = 2
_HEADER = 16  # bytes: kind and count, int64 each
_INDEX = 8  # bytes of a row's index


@dataclass(frozen=True, kw_only=True, eq=False)
class SparseRows:
    """Rows of a gradient, each at most once.

    Attributes:
        kind: `ABSENT`, `SPARSE` or `DENSE`.
        indices: (count,) int64, the rows' indices in the table.
        values: (count, …), the rows.
    """

    kind: int
    indices: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Form of a parameter whose gradient is row-sparse.

    Attributes:
        shape: the parameter's, (rows, …).
        empty: (0, …), of its dtype and device; not the parameter, which is watched for uses.
    """

    shape: torch.Size
    empty: Tensor

    @staticmethod
    def of(parameter: Tensor) -> Table:
        """Take a parameter's form."""
        empty = torch.empty(
            (0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device
        )
        return Table(shape=parameter.shape, empty=empty)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's values."""
        return self.shape[1:].numel() * self.empty.element_size()


@torch.no_grad()
def rows_of(gradient: Tensor | None, weight: float, table: Table) -> SparseRows:
    """Return a gradient's rows times `weight`, in memory of their own.

    Args:
        gradient: of the table; None: the rank has none.
        weight: the rank's share; with 0 the gradient counts as absent, whatever it is.
        table: the parameter's form.
    """
    if gradient is None or not weight:
        indices = torch.empty(0, dtype=torch.int64, device=table.empty.device)
        return SparseRows(kind=ABSENT, indices=indices, values=table.empty)
    if gradient.is_sparse and gradient.sparse_dim() == 1:
        gradient = gradient.coalesce()
        indices = gradient.indices()[0].clone()
        values = gradient.values() * weight
        return SparseRows(kind=SPARSE, indices=indices, values=values)
    values = (gradient.to_dense() if gradient.is_sparse else gradient) * weight
    indices = torch.arange(table.shape[0], device=values.device)
    return SparseRows(kind=DENSE, indices=indices, values=values)


@torch.no_grad()
def sum_rows(parts: Sequence[SparseRows], table: Table) -> Tensor | None:
    """Return the sum of all ranks' rows, added in the order of `parts`.

    Returns:
        a gradient of the table: None where no rank has one, dense where any rank's is, otherwise
        sparse and coalesced.
    """
    kind = max(part.kind for part in parts)
    if kind == ABSENT:
        return None
    if kind == DENSE:
        total = table.empty.new_zeros(table.shape)
        for part in parts:
            total.index_add_(0, part.indices, part.values)  # each row once: in a fixed order
        return total
    indices = torch.cat([part.indices for part in parts])
    present, places = torch.unique(indices, return_inverse=True)
    values = table.empty.new_zeros(len(present), *table.shape[1:])
    counts = [len(part.indices) for part in parts]
    for part, place in zip(parts, places.split(counts), strict=True):
        values.index_add_(0, place, part.values)
    return torch.sparse_coo_tensor(
        present[None], values, table.shape, is_coalesced=True, check_invariants=False
    )


class RowMessages:
    """Format of messages with a table's rows, of a capacity that all ranks know.

    Args:
        table: the parameter's form.
    """

    def __init__(self, table: Table) -> None:
        self._empty = table.empty
        self._row_bytes = table.row_bytes

    def size(self, capacity: int) -> int:
        """Return the bytes of a message with room for `capacity` rows."""
        return _HEADER + capacity * (_INDEX + self._row_bytes)

    def pack(self, rows: SparseRows, start: int, capacity: int) -> Tensor:
        """Return the message of the rows from `start` on, as many as fit; the rest is zeros."""
        message = torch.zeros(self.size(capacity), dtype=torch.uint8, device=self._empty.device)
        header = torch.tensor([rows.kind, len(rows.indices)])
        message[:_HEADER].view(torch.int64).copy_(header)
        indices, values = self._views(message, len(rows.indices[start : start + capacity]))
        indices.copy_(rows.indices[start : start + capacity])
        values.copy_(rows.values[start : start + capacity])
        return message

    def headers(self, messages: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Return the kind of each message's gradient, and the number of all its rows."""
        table = torch.stack([message[:_HEADER] for message in messages]).cpu()
        return [(kind, count) for kind, count in table.view(torch.int64).tolist()]

    def unpack(self, messages: Sequence[Tensor], kind: int, counts: Sequence[int]) -> SparseRows:
        """Return the rows of one rank's messages.

        Args:
            messages: the rank's.
            kind: of its gradient.
            counts: the number of rows in each message.
        """
        views = [self._views(*pair) for pair in zip(messages, counts, strict=True)]
        return SparseRows(
            kind=kind,
            indices=torch.cat([indices for indices, _ in views]),
            values=torch.cat([values for _, values in views]),
        )

    def _views(self, message: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """View a message's first `count` indices and rows."""
        capacity = (len(message) - _HEADER) // (_INDEX + self._row_bytes)
        ends = [_HEADER + capacity * _INDEX, _HEADER + capacity * (_INDEX + self._row_bytes)]
        indices = message[_HEADER : ends[0]].view(torch.int64)
        values = message[ends[0] : ends[1]].view(self._empty.dtype)
        return indices[:count], values.view(capacity, *self._empty.shape[1:])[:count]
