"""Checksums of a replica's state: what changes them, and what doesn't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.replica.checksums import checksums_of, code_of
from paceline.replica.state_parts import BUFFERS, ENTRIES, GROUPS, OPTIMIZER, PARAMETERS, RANK

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
SIZES = (7, 600_011)  # summed by CRC-32, and by weights


def checksum(tensor: Tensor) -> int:
    state: dict[str, dict[Any, Any]] = {part: {} for part in (BUFFERS, GROUPS, OPTIMIZER, RANK)}
    state |= {PARAMETERS: {"weight": tensor}, ENTRIES: {"weight": "weight"}}
    return checksums_of(state)["weight"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_each_flipped_bit_changes_it(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    words, before = tensor.view(WORDS[dtype.itemsize]), checksum(tensor)
    bits = 8 * dtype.itemsize
    for place in (0, 1, 5, size // 2, size // 2 + 1, size - 1):
        for bit in (0, 1, bits // 2, bits - 3, bits - 2, bits - 1):
            mask = 1 << bit if bit < bits - 1 else -(1 << bit)
            words[place] ^= mask
            assert checksum(tensor) != before, (place, bit)
            words[place] ^= mask
    assert checksum(tensor) == before


@pytest.mark.parametrize("size", SIZES)
def test_an_exchange_of_two_values_changes_it(size: int) -> None:
    tensor = torch.arange(size, dtype=torch.float32)
    before = checksum(tensor)
    for one, other in ((0, 1), (1, 6), (0, size // 2), (size // 2, size - 1)):
        exchanged = tensor.clone()
        exchanged[[one, other]] = exchanged[[other, one]]
        assert checksum(exchanged) != before, (one, other)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (64, 64, 9, 9)])
def test_a_layout_of_memory_changes_nothing(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    assert checksum(tensor.contiguous(memory_format=torch.channels_last)) == checksum(tensor)


def test_the_code_depends_on_each_checksum() -> None:
    assert code_of({"a": 1, "b": 2}) == code_of({"b": 2, "a": 1})
    assert len({code_of({"a": 1, "b": 2}), code_of({"a": 1, "b": 3}), code_of({"a": 1})}) == 3
