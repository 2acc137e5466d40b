"""Rows of a table's gradient are packed, unpacked and summed in rank order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.reduce.sparse_rows import (
    ABSENT,
    DENSE,
    SPARSE,
    RowMessages,
    SparseRows,
    Table,
    rows_of,
    sum_rows,
)

TABLE = Table.of(torch.zeros(6, 2, dtype=torch.float64))


def sparse(indices: list[int], first: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Make a gradient of rows [first, first], [first + 1, …], …, in the order of `indices`."""
    rows = torch.arange(len(indices), dtype=dtype)[:, None].expand(-1, 2) + first
    return torch.sparse_coo_tensor([indices], rows, (6, 2), check_invariants=True)


def test_rows_are_weighted_and_each_is_there_once() -> None:
    rows = rows_of(sparse([4, 1, 4]), 0.5, TABLE)
    assert rows.kind == SPARSE
    assert rows.indices.tolist() == [1, 4]
    assert rows.values.tolist() == [[1.0, 1.0], [2.0, 2.0]]


def test_rows_dont_share_the_gradients_memory() -> None:
    gradient = sparse([1, 4]).coalesce()
    rows = rows_of(gradient, 1.0, TABLE)
    gradient.zero_()
    gradient.indices().zero_()
    assert rows.values.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert rows.indices.tolist() == [1, 4]


@pytest.mark.parametrize(("gradient", "weight"), [(None, 1.0), (sparse([1]), 0.0)])
def test_a_rank_without_a_gradient_or_a_share_has_no_rows(
    gradient: Tensor | None, weight: float
) -> None:
    rows = rows_of(gradient, weight, TABLE)
    assert (rows.kind, len(rows.indices), rows.values.shape) == (ABSENT, 0, (0, 2))


@pytest.mark.parametrize("make", [torch.Tensor.to_dense, lambda g: g.to_dense().to_sparse()])
def test_a_gradient_that_is_dense_or_sparse_in_both_dimensions_has_all_rows(make: object) -> None:
    assert callable(make)
    rows = rows_of(make(sparse([1, 4])), 0.5, TABLE)
    assert rows.kind == DENSE
    assert rows.indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(rows.values, sparse([1, 4]).to_dense() / 2)


def test_the_sum_has_the_rows_of_all_ranks() -> None:
    parts = [rows_of(g, 1.0, TABLE) for g in (sparse([5, 2]), None, sparse([2, 0], 10.0))]
    total = sum_rows(parts, TABLE)
    assert total is not None
    assert total.is_coalesced()
    assert total.indices().tolist() == [[0, 2, 5]]
    assert total.values()[:, 0].tolist() == [11.0, 12.0, 1.0]
    torch._validate_sparse_coo_tensor_args(total.indices(), total.values(), total.shape)


def test_a_row_without_values_stays_in_the_sum() -> None:
    """SparseAdam updates the moments of each row that is there."""
    total = sum_rows([rows_of(sparse([3], 0.0), 1.0, TABLE)], TABLE)
    assert total is not None
    assert total.indices().tolist() == [[3]]


def test_a_gradient_of_no_rows_is_not_an_absent_one() -> None:
    total = sum_rows([rows_of(sparse([]), 1.0, TABLE), rows_of(None, 1.0, TABLE)], TABLE)
    assert total is not None
    assert total.is_sparse
    assert total._nnz() == 0
    assert sum_rows([rows_of(None, 1.0, TABLE)] * 2, TABLE) is None


def test_a_dense_gradient_makes_the_sum_dense() -> None:
    parts = [rows_of(g, 1.0, TABLE) for g in (sparse([1]), sparse([1, 4]).to_dense())]
    total = sum_rows(parts, TABLE)
    assert total is not None
    assert torch.equal(total, (sparse([1]) + sparse([1, 4])).to_dense())


@pytest.mark.parametrize("dense", [False, True])
def test_a_row_is_summed_in_the_order_of_the_ranks(dense: bool) -> None:
    table = Table.of(torch.zeros(6, 2))
    big, small = 2.0**24, 1.0  # big + small == big in float32
    gradients = [sparse([3], first, torch.float32) for first in (big, small, -big)]
    parts = [rows_of(g.to_dense() if dense else g, 1.0, table) for g in gradients]
    total, other = (sum_rows(order, table) for order in (parts, [parts[0], parts[2], parts[1]]))
    assert total is not None
    assert other is not None
    assert total.to_dense()[3, 0] == 0.0
    assert other.to_dense()[3, 0] == 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 3), (9,), (9, 2, 5)])
@pytest.mark.parametrize("first", [0, 2, 4, 7])
def test_messages_bring_rows_of_any_shape(
    shape: tuple[int, ...], dtype: torch.dtype, first: int
) -> None:
    torch.manual_seed(0)
    table = Table.of(torch.zeros(shape, dtype=dtype))
    values = torch.randn(4, *shape[1:]).to(dtype)
    rows = SparseRows(kind=SPARSE, indices=torch.tensor([1, 3, 4, 8]), values=values)
    messages = RowMessages(table)
    sent = [messages.pack(rows, 0, first), messages.pack(rows, first, 3)]
    assert [message.nbytes for message in sent] == [messages.size(first), messages.size(3)]
    assert messages.headers(sent) == [(SPARSE, 4)] * 2
    taken = min(4, first)
    found = messages.unpack(sent, SPARSE, [taken, min(4 - taken, 3)])
    count = min(4, first + 3)
    assert found.indices.tolist() == [1, 3, 4, 8][:count]
    assert torch.equal(found.values, values[:count])
