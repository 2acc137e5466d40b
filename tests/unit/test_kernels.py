"""Weighted sums: their order, their rounding, and who else may run meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from itertools import product as product_of
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.codecs.codec import Codec, Piece
from paceline.codecs.kernels import compiled
from tests.harness.reference import plain

every_kernel = pytest.mark.parametrize("kernels", [compiled, plain], ids=["compiled", "plain"])
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16]
)


def parts_of(count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count * numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(count)]


def whole(parts: Sequence[Tensor]) -> list[list[Piece]]:
    """Take each part for one piece."""
    return [[(0, len(part), part)] for part in parts]


def pieces(part: Tensor, *cuts: int) -> list[Piece]:
    """Cut a part at some places into pieces that lie apart."""
    return [(a, b, part[a:b].clone()) for a, b in pairwise([0, *cuts, len(part)])]


@pytest.mark.parametrize("numel", [0, 1, 255, 4096, 4097, 100_003])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@every_kernel
def test_parts_are_added_in_order_and_each_step_is_rounded(
    kernels: Any, count: int, numel: int
) -> None:
    for dtype, kind in ((torch.float32, np.float32), (torch.float64, np.float64)):
        parts = parts_of(count, numel, dtype)
        weights = [0.3, 1.0, 1 / 7, 0.2, 0.11][:count]
        products = [kind(w) * p.numpy() for w, p in zip(weights, parts, strict=True)]
        expected = products[0]
        for product in products[1:]:
            expected = expected + product
        for past_caches, edge in product_of([False, True], [0, 1]):
            room = torch.full((numel + 2,), 7.0, dtype=dtype)
            out = room[edge : edge + numel]
            kernels.add_up(whole(parts), weights, out, past_caches=past_caches)
            assert out.numpy().tobytes() == expected.tobytes()
            assert (room[:edge] == 7).all()
            assert (room[edge + numel :] == 7).all()


@every_dtype
@every_kernel
def test_pieces_cut_differently_are_added_as_the_wholes_are(
    kernels: Any, dtype: torch.dtype
) -> None:
    parts, weights = parts_of(3, 70_001, dtype), [0.3, 0.7, 0.2]
    out, expected = torch.full((2, 70_001), 7.0, dtype=dtype)
    cut = [pieces(parts[0], 1, 1, 5000, 32_768), pieces(parts[1], 4096, 70_000), pieces(parts[2])]
    for count, past_caches in product_of([1, 2, 3], [False, True]):
        kernels.add_up(cut[:count], weights[:count], out, past_caches=past_caches)
        kernels.add_up(whole(parts[:count]), weights[:count], expected)
        assert torch.equal(out, expected)


@every_kernel
def test_parts_that_do_not_cover_the_sum_are_our_bug(kernels: Any) -> None:
    out, other = torch.zeros(10), torch.zeros(10, dtype=torch.float64)
    for part in (pieces(out[1:]), pieces(out, 4)[1:], pieces(other)):
        with pytest.raises(AssertionError):
            kernels.add_up([pieces(out), part], [1.0, 1.0], out)


@every_dtype
@every_kernel
def test_a_part_of_weight_0_is_left_out_whatever_it_holds(kernels: Any, dtype: torch.dtype) -> None:
    for place in range(3):
        parts, weights = parts_of(3, 5000, dtype), [0.5, 0.25, 0.125]
        kept = [p.clone() for k, p in enumerate(parts) if k != place]
        parts[place].fill_(torch.nan)
        weights[place] = 0.0
        out, expected = torch.full((2, 5000), 7.0, dtype=dtype)
        kernels.add_up(whole(parts), weights, out)
        kernels.add_up(whole(kept), [w for w in weights if w], expected)
        assert torch.equal(out, expected)
        assert out.isfinite().all()


@every_dtype
@every_kernel
def test_no_part_that_counts_makes_zeros(kernels: Any, dtype: torch.dtype) -> None:
    nothing = whole([torch.full((5000,), torch.nan, dtype=dtype)])
    for past_caches in (False, True):
        out = torch.full((5000,), 7.0, dtype=dtype)
        kernels.add_up(nothing, [0.0], out, past_caches=past_caches)
        assert torch.equal(out, torch.zeros_like(out))


@every_dtype
def test_the_kernels_add_to_the_same_bits_as_the_reference(dtype: torch.dtype) -> None:
    parts, weights = parts_of(4, 70_001, dtype), [0.3, 0.21, 0.0, 1 / 3]
    one, other = torch.zeros(2, 70_001, dtype=dtype)
    compiled.add_up(whole(parts), weights, one)
    plain.add_up(whole(parts), weights, other)
    assert torch.equal(one, other)


@pytest.mark.parametrize("work", ["sum", "bf16", "int8"])
@every_kernel
def test_other_threads_go_on_meanwhile(kernels: Any, work: str) -> None:
    parts = parts_of(2, 300_000, torch.float32)
    out, data = torch.zeros(300_000), torch.zeros(2 * 300_000, dtype=torch.uint8)
    codec: Codec = kernels.Int8() if work == "int8" else kernels.Bf16()

    def once() -> None:
        if work == "sum":
            kernels.add_up(whole(parts), [0.5, 0.5], out)
        else:
            here = data[: codec.size(300_000)]
            codec.encode([(0, 300_000, parts[0])], 1.0, parts[1], here, out)

    once()  # compiled, before the threads
    asked, stopped = Event(), []

    def work_on() -> None:
        stopped.append(any(asked.is_set() or once() for _ in range(5000)))

    with only_by_letting_go():
        thread = Thread(target=work_on)
        thread.start()
        asked.set()
        thread.join()
    assert stopped == [True]


@contextmanager
def only_by_letting_go() -> Iterator[None]:
    """Let a thread run only once the one that runs lets go of the interpreter by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
