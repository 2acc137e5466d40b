"""Which parts of a model are compiled on their own."""

from __future__ import annotations

import pytest
from torch import nn

from paceline.models.compiled_blocks import blocks
from paceline.models.resnet import BasicBlock, Bottleneck
from paceline.models.zoo import build_model


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [("resnet18", BasicBlock, 8), ("resnet50", Bottleneck, 16), ("resnet152", Bottleneck, 50)],
)
def test_a_resnets_are_its_residual_blocks(name: str, kind: type[nn.Module], count: int) -> None:
    found = blocks(build_model(name, num_labels=2, num_channels=3))
    assert [type(block) for block in found] == [kind] * count


def test_a_transformers_are_its_layers() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(5, 8),
            "body": nn.TransformerEncoder(layer, 3),
            "head": nn.Linear(8, 5),
        }
    )
    assert blocks(model) == list(model["body"].layers)  # type: ignore[union-attr, arg-type]


class Experts(nn.Module):
    """A block with repeated parts."""

    def __init__(self) -> None:
        super().__init__()
        mlps = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)]
        self.experts = nn.ModuleList(mlps)


def test_a_repeated_block_is_one_whatever_is_repeated_in_it() -> None:
    rows = [Experts(), Experts()]
    assert blocks(nn.Sequential(nn.Linear(2, 2), *rows)) == rows
    assert blocks(nn.Sequential(nn.Linear(2, 2), rows[0])) == list(rows[0].experts)


def test_sequences_of_operations_in_a_row_are_blocks() -> None:
    rows = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)]
    assert blocks(nn.Sequential(*rows, nn.Linear(2, 2))) == rows


def test_a_block_in_two_places_is_one() -> None:
    row = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert blocks(nn.Sequential(row, row)) == [row]


def test_lists_are_never_blocks_but_what_is_in_them_may_be() -> None:
    inner = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)]
    model = nn.ModuleList([nn.ModuleList(inner), nn.ModuleList([nn.Linear(2, 2)])])
    assert blocks(model) == inner


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.head = nn.Linear(2, 2)


def test_without_blocks_it_is_the_composed_children() -> None:
    model = Parts()
    assert blocks(model) == [model.encoder]


def test_without_those_it_is_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert blocks(model) == [model]
