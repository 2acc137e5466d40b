"""Payloads without blocks of zeros stand for the same bytes; which parameters are tables."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.reduce.put_engine.layout import CONTRIBUTION, PREAMBLE, SUM
from paceline.reduce.put_engine.zero_suppression import (
    _PROBES,
    BLOCK_BYTES,
    RETURNED,
    ZeroSuppression,
)
from paceline.replica.trained_parameters import table_parameters


@st.composite
def sources(draw: st.DrawFn) -> Tensor:
    """Draw bytes, (size,): blocks of zeros, some with a byte or all bytes other than zero."""
    size = draw(st.integers(0, 40 * BLOCK_BYTES))
    data = torch.zeros(size, dtype=torch.uint8)
    for at in draw(st.lists(st.integers(0, 40 * BLOCK_BYTES), max_size=30)):
        data[at : at + draw(st.sampled_from([1, 1, BLOCK_BYTES, 7 * BLOCK_BYTES]))] = draw(
            st.integers(1, 255)
        )
    return data


def received(payload: list[Tensor], size: int) -> Tensor:
    """Put a payload into a receive buffer that holds other bytes."""
    buffer = torch.full((PREAMBLE + size,), 77, dtype=torch.uint8)
    data = torch.cat([part.view(torch.uint8) for part in payload])
    assert len(data) <= len(buffer)
    buffer[: len(data)] = data
    return buffer


@given(steps=st.lists(sources(), min_size=1, max_size=4), cut=st.integers(0, 40 * BLOCK_BYTES))
def test_a_receiver_restores_all_bytes_in_each_step(steps: list[Tensor], cut: int) -> None:
    size = min(map(len, steps))
    sender, receiver = ZeroSuppression(1), ZeroSuppression(1)
    for data in (step[:size].clone() for step in steps):
        parts = [data[: min(cut, size)], data[min(cut, size) :]]
        for kind, to in ((CONTRIBUTION, 0), (SUM, RETURNED)):
            payload = sender.suppress(to, parts)
            assert receiver.restore(kind, 1, received(payload, size)).equal(data)
        assert sender.traffic()[0] == receiver.traffic()[1]


@given(data=sources())
def test_a_payload_is_a_preamble_longer_at_most(data: Tensor) -> None:
    made = ZeroSuppression(3)
    size = sum(part.nbytes for part in made.suppress(0, [data]))
    assert size <= PREAMBLE + len(data)
    assert made.traffic() == (size, 0)
    made.suppress(RETURNED, [data])  # to each of the three
    assert made.traffic()[0] == 4 * size


def test_blocks_of_zeros_are_left_out() -> None:
    data = torch.zeros(1000, BLOCK_BYTES, dtype=torch.uint8)
    data[[3, 500]] = 1
    (payload,) = ZeroSuppression(1).suppress(0, [data.flatten()])
    assert len(payload) == PREAMBLE + 2 * (BLOCK_BYTES + 4)


def test_blocks_travel_as_they_are_where_only_those_looked_at_first_are_zeros() -> None:
    data = torch.ones(100 * _PROBES, BLOCK_BYTES, dtype=torch.uint8)
    data[::100] = 0
    preamble, whole = ZeroSuppression(1).suppress(0, [data.flatten()])
    assert (len(preamble), whole.nbytes) == (PREAMBLE, data.nbytes)


def test_negative_zeros_travel() -> None:
    values = torch.zeros(1600)
    values[33] = -0.0
    (payload,) = ZeroSuppression(1).suppress(0, [values])
    restored = ZeroSuppression(1).restore(SUM, 0, received([payload], values.nbytes))
    assert restored.view(torch.int32).equal(values.view(torch.int32))


def test_no_values_have_a_payload_too() -> None:
    payload = ZeroSuppression(1).suppress(0, [])
    assert len(ZeroSuppression(1).restore(SUM, 0, received(payload, 0))) == 0


class Tied(nn.Module):
    """A table that an output layer shares, and one that two embeddings share."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5000, 64)
        self.out = nn.Linear(64, 5000, bias=False)
        self.out.weight = self.words.weight
        self.source, self.target = nn.Embedding(5000, 64), nn.EmbeddingBag(5000, 64)
        self.target.weight = self.source.weight


def test_tables_are_large_weights_of_embeddings_alone() -> None:
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(5000, 64),
            "bag": nn.EmbeddingBag(5000, 64),
            "rows": nn.Embedding(5000, 64, sparse=True),
            "small": nn.Embedding(50, 64),
            "dense": nn.Linear(5000, 64),
            "lazy": nn.LazyLinear(64),
            "tied": Tied(),
        }
    )
    names = {p: name for name, p in model.named_parameters()}
    tables = {names[p] for p in table_parameters(model)}
    assert tables == {"words.weight", "bag.weight", "tied.source.weight"}
