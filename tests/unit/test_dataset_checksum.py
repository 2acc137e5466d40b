"""Checksums of data sets: of ranks that split, shuffle or number their samples by themselves.

Public reports of the kind: pytorch/pytorch#77154 (a split that each rank draws), numbers of classes
from a set, whose order is each process's own, and a folder's files in the order of the disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from paceline.data.dataset_checksum import dataset_checksum

X = torch.arange(4_000.0).reshape(1_000, 4)
Y = torch.arange(1_000) % 7


class Files(Dataset[Any]):
    """A data set of files, as torchvision's ImageFolder has them."""

    def __init__(self, root: str, names: list[str], classes: list[str]) -> None:
        self.root = root
        self.samples = [(f"{root}/{name}", index) for index, name in enumerate(names)]
        self.paths = [Path(root) / name for name in names]
        self.class_to_idx = {name: number for number, name in enumerate(classes)}
        self.cache = {id(self): root}
        self.transform = object()


class Arrays(Dataset[Any]):
    def __init__(self, values: Any) -> None:
        self.values = values


def split(seed: int) -> Dataset[Any]:
    part, _ = random_split(
        TensorDataset(X, Y), [800, 200], generator=torch.Generator().manual_seed(seed)
    )
    return part


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (split(1), split(2)),
        (
            Subset(TensorDataset(X), range(0, 1_000, 2)),
            Subset(TensorDataset(X), range(1, 1_001, 2)),
        ),
        (TensorDataset(X, Y), TensorDataset(X, Y.flip(0))),
        (ConcatDataset([split(1), split(3)]), ConcatDataset([split(1), split(2)])),
        (Files("a", ["x", "y"], ["cat", "dog"]), Files("a", ["y", "x"], ["cat", "dog"])),
        (Files("a", ["x", "y"], ["cat", "dog"]), Files("a", ["x", "y"], ["dog", "cat"])),
        (Arrays(np.arange(9)), Arrays(np.arange(9)[::-1])),
        (Arrays([X, Y]), Arrays([X + 1, Y])),
        (Arrays(X.to(torch.complex64)), Arrays(X.flip(0).to(torch.complex64))),
    ],
    ids=["split", "parts", "labels", "inner", "files", "classes", "arrays", "lists", "complex"],
)
def test_other_samples_have_another_checksum(one: Any, other: Any) -> None:
    assert dataset_checksum(one) != dataset_checksum(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (split(1), split(1)),
        (Files("/mnt/a", ["x"], ["cat"]), Files("/data", ["x"], ["cat"])),
        (Arrays(torch.zeros(0)), Arrays(torch.zeros(0))),
        (Arrays([object()]), Arrays([object()])),
        (Arrays(X.to_sparse()), Arrays(X.to_sparse())),
        (3, 4),
    ],
    ids=["split", "folders", "empty", "objects", "sparse", "no data set"],
)
def test_equal_samples_have_the_same_checksum(one: Any, other: Any) -> None:
    assert dataset_checksum(one) == dataset_checksum(other)
