"""What every wire keeps to, compiled or plain, and the one that CONTRIBUTING.md shows."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.codecs import codecs
from paceline.codecs.codec import Codec
from paceline.codecs.kernels import compiled, compiled_int4, compiled_topk
from tests.harness.equivalence.codec_memory import code, example, same, same_bits, wild
from tests.harness.reference import plain, plain_int4, plain_topk
from tests.harness.reference.unencoded import Unencoded

TWINS: dict[str, Any] = {"compiled": compiled, "plain": plain}
KINDS: dict[str, dict[str, Codec]] = {
    "bf16": {name: twin.Bf16() for name, twin in TWINS.items()},
    "int8": {name: twin.Int8() for name, twin in TWINS.items()},
    "int4": {"compiled": compiled_int4.Int4(), "plain": plain_int4.Int4()},
} | {
    f"topk:{fraction}:{bits}": {
        "compiled": compiled_topk.TopK(fraction=Fraction(fraction), bits=bits),
        "plain": plain_topk.TopK(fraction=Fraction(fraction), bits=bits),
    }
    for fraction, bits in (("0.02", 2), ("0.02", 4), ("0.37", 2))
}
INT8 = (compiled.Int8, plain.Int8)
INT4 = (compiled_int4.Int4, plain_int4.Int4)
TOPK = (compiled_topk.TopK, plain_topk.TopK)
SIZES = [0, 1, 255, 256, 257, 4096, 4097, 1_000_003]
SUMMED = [*SIZES[:-1], 131_075]  # the last is several chunks of each codec, and some values


def contributed() -> Codec:
    """Read the wire that CONTRIBUTING.md shows as an example."""
    text = Path(__file__, "../../../CONTRIBUTING.md").resolve().read_text()
    chapter = text[text.index("## How to add a codec") :]
    names: dict[str, Any] = {}
    exec(chapter[chapter.index("```python") + 10 : chapter.index("```\n\nThen")], names)
    codec: Codec = names["Fp16"]()
    return codec


ALL = {f"{kind}, {twin}": KINDS[kind][twin] for kind in KINDS for twin in TWINS} | {
    "unencoded": Unencoded(),
    "CONTRIBUTING's": contributed(),
}
every_wire = pytest.mark.parametrize("codec", ALL.values(), ids=ALL.keys())


def block_of(codec: Codec) -> int:
    """Return how many values share a scale, or a threshold."""
    if isinstance(codec, TOPK):
        return plain_topk.CHUNK
    return plain_int4.BLOCK if isinstance(codec, INT4) else plain.BLOCK


def error_bound(codec: Codec, block: Tensor) -> Tensor:
    """How far decoded values may be from a block's, (n,) of float64."""
    if isinstance(codec, INT8):
        return block.abs().max() * (0.5 / 127 + 2.0**-20)
    if isinstance(codec, INT4):
        return block.abs().max() * (0.5 / 7 + 2.0**-20)
    if isinstance(codec, TOPK):
        kept = block.abs().topk(codec.kept(len(block))).values
        span = kept[0] - kept[-1]
        off = span if codec.bits == 2 else span * (0.5 / 7)
        return torch.where(block.abs() < kept[-1], block.abs(), off + kept[0] * 2.0**-20)
    if isinstance(codec, Unencoded):
        return torch.zeros(())
    if isinstance(codec, (compiled.Bf16, plain.Bf16)):
        return block.abs() * 2.0**-8
    return block.abs() * 2.0**-11 + 2.0**-25  # half of float16's smallest step


@pytest.mark.parametrize("numel", SIZES)
@every_wire
def test_what_is_decoded_and_what_is_missed_add_up_to_the_value(codec: Codec, numel: int) -> None:
    values, coded = example(codec, numel, seed=numel)
    assert same(coded.after, values - coded.decoded)
    rounding = 0.0  # where a level is far above a value, their difference is rounded
    if isinstance(codec, TOPK) and numel:
        rounding = values.abs().max().item() * 2.0**-24
    assert same(coded.after + coded.decoded, values, rounding)


@pytest.mark.parametrize("numel", SIZES)
@every_wire
def test_values_are_decoded_as_precisely_as_the_wire_promises(codec: Codec, numel: int) -> None:
    values, coded = example(codec, numel, seed=numel)
    size = block_of(codec)
    for block, decoded in zip(values.double().split(size), coded.decoded.split(size), strict=True):
        off = (block - decoded).abs()
        assert not numel or bool((off <= error_bound(codec, block)).all())


@every_wire
def test_a_wire_writes_its_own_memory_only(codec: Codec) -> None:
    for numel in (0, 1, 63, 257, 4097):
        coded = code(codec, [(0, numel, torch.ones(numel))], 1.0, torch.zeros(numel))
        assert coded.untouched, numel


@every_wire
def test_pieces_are_encoded_as_the_whole_is(codec: Codec) -> None:
    values, before = torch.randn(20_000), torch.randn(20_000)
    cuts = [0, 1, 1, 300, 4096, 9000, 20_000]
    pieces = [(a, b, values[a:b].clone()) for a, b in pairwise(cuts)]
    whole = code(codec, [(0, 20_000, values)], 0.7, before)
    assert code(codec, pieces, 0.7, before) == whole


@every_wire
def test_no_source_counts_as_zeros(codec: Codec) -> None:
    values, before = torch.randn(1000), torch.randn(1000)
    zeros = values.clone()
    zeros[100:600] = 0
    pieces = [
        (0, 100, values[:100]),
        (100, 600, None),
        (600, 1000, values[600:]),
    ]
    assert code(codec, pieces, 0.3, before) == code(codec, [(0, 1000, zeros)], 0.3, before)


@every_wire
def test_a_source_of_weight_0_counts_as_zeros_whatever_it_holds(codec: Codec) -> None:
    bad, before = torch.full((300,), torch.nan), torch.randn(300)
    expected = code(codec, [(0, 300, None)], 1.0, before)
    assert code(codec, [(0, 300, bad)], 0.0, before) == expected


@every_wire
def test_what_is_missed_may_replace_what_was_missed_before(codec: Codec) -> None:
    values, before = torch.randn(5000), torch.randn(5000)
    sources = [(0, 2000, values[:2000]), (2000, 5000, None)]
    apart = code(codec, sources, 0.3, before)
    assert code(codec, sources, 0.3, before, in_place=True) == apart


@pytest.mark.parametrize("own", [0, 1, 2])
@pytest.mark.parametrize("numel", SUMMED)
@every_wire
def test_a_sum_is_coded_as_its_steps_one_by_one_code_it(codec: Codec, numel: int, own: int) -> None:
    missed = torch.randn(numel)
    groups = [example(codec, numel, seed=seed)[1] for seed in (1, 2)]
    values, third = torch.randn(numel), numel // 3
    pieces = [(0, third, values[:third]), (third, third, None), (third, numel, values[third:])]
    parts: list[Tensor | None] = [group.data for group in groups]
    parts.insert(own, None)
    expected = torch.zeros(numel)
    decoded = iter(groups)
    for part in parts:
        expected += values * 0.3 if part is None else next(decoded).decoded
    once = code(codec, [(0, numel, expected)], 1.0, missed)
    data, after = torch.zeros(codec.size(numel), dtype=torch.uint8), torch.full((numel,), 7.0)
    out = torch.full((numel,), 7.0)
    codec.reduce(parts, pieces, 0.3, missed, data, after, out)
    assert torch.equal(data, once.data)
    assert same_bits(after, once.after)
    assert same_bits(out, once.decoded)


@every_wire
def test_a_sum_leaves_out_what_has_no_weight_and_no_source(codec: Codec) -> None:
    (_, group), zeros = example(codec, 600, seed=1), torch.zeros(600)
    bad, n = torch.full((300,), torch.nan), len(group.data)
    for pieces, weight in ([(0, 300, bad), (300, 600, bad)], 0.0), ([(0, 600, None)], 1.0):
        for parts in ([None, group.data], [group.data, None]):
            data, out = torch.zeros(n, dtype=torch.uint8), torch.full((600,), torch.nan)
            codec.reduce(parts, pieces, weight, zeros, data, zeros.clone(), out)
            again = code(codec, [(0, 600, group.decoded)], 1.0, zeros)
            assert same_bits(out, again.decoded)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@every_wire
def test_a_value_that_is_no_number_is_seen_and_is_forgotten(codec: Codec, bad: float) -> None:
    size = block_of(codec)
    values = torch.randn(3 * size - 68)
    n, place = len(values), size + 44
    values[place] = bad
    coded = code(codec, [(0, n, values)], 0.5, torch.zeros(n))
    assert not coded.decoded[place].isfinite()
    assert coded.decoded[:size].isfinite().all()
    assert coded.decoded[2 * size :].isfinite().all()
    assert coded.after.isfinite().all()
    assert coded.after[place] == 0
    good = code(codec, [(0, n, torch.ones(n))], 1.0, coded.after)
    assert good.decoded.isfinite().all()


@every_wire
def test_a_step_can_be_taken_back(codec: Codec) -> None:
    before = torch.randn(600)
    kept = before.clone()
    first = code(codec, [(0, 600, torch.full((600,), torch.nan))], 1.0, before)
    assert not first.decoded.isfinite().any()
    assert same(before, kept)


@every_wire
def test_sums_of_many_steps_follow_the_true_sums(codec: Codec) -> None:
    steps, numel = 300, 1000
    torch.manual_seed(0)
    faint = torch.full((numel,), 1e-4)
    faint[::256] = 1.0  # beside which the others are less than int8's smallest code
    missed, sum_decoded = torch.zeros(numel), torch.zeros(numel, dtype=torch.float64)
    sum_true, worst = torch.zeros(numel, dtype=torch.float64), 0.0
    for _ in range(steps):
        gradient = faint * (1 + 0.1 * torch.randn(numel))
        sum_true += (0.5 * gradient).double()
        coded = code(codec, [(0, numel, gradient)], 0.5, missed)
        sum_decoded += coded.decoded.double()
        missed, worst = coded.after, max(worst, coded.after.abs().max().item())
    rounding = steps * 2.0**-24  # of weight * gradient + before, in float32
    assert (sum_decoded - sum_true).abs().max() <= worst + rounding
    assert same(sum_decoded + missed, sum_true, rounding)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(values=wild(), before=wild(), weight=st.sampled_from([0.0, 1.0, 0.3, -1e30]))
def test_both_twins_give_the_same_bits(
    kind: str, values: Tensor, before: Tensor, weight: float
) -> None:
    n = min(len(values), len(before))
    sources = [(0, n // 3, values[: n // 3]), (n // 3, n, values[n // 3 : n])]
    one, other = (code(codec, sources, weight, before[:n]) for codec in KINDS[kind].values())
    assert same_bits(one.decoded, other.decoded)
    assert same_bits(one.after, other.after)
    assert torch.equal(one.data, other.data)


@pytest.mark.parametrize("twin", TWINS)
def test_bf16_rounds_as_torch_does(twin: str) -> None:
    upper = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper | lower).flatten()
    values = torch.where(bits < 2**31, bits, bits - 2**32).int().view(torch.float32)
    n = len(values)
    coded = code(TWINS[twin].Bf16(), [(0, n, None)], 1.0, values)
    expected = values.bfloat16()
    number = ~expected.isnan()
    codes = coded.data.view(torch.int16)
    assert torch.equal(codes[number], expected.view(torch.int16)[number])
    assert set(codes[~number].tolist()) == {0x7FC0}
    missed = (values - expected.float()).nan_to_num(0, 0, 0)
    assert same(coded.after, missed)


@pytest.mark.parametrize("twin", TWINS)
def test_int8_codes_a_block_by_its_largest_magnitude(twin: str) -> None:
    values = torch.arange(-127, 129, dtype=torch.float32) / 2  # halves, from -63.5 to 64
    values = torch.cat([values, torch.tensor([2.54, 1.0, -0.011, 0.009, -0.0, 0.03])])
    n = len(values)
    coded = code(TWINS[twin].Int8(), [(0, n, values)], 1.0, torch.zeros(n))
    scales, codes = coded.data[:8].view(torch.float32), coded.data[64:].view(torch.int8)
    assert scales.tolist() == (torch.tensor([64.0, 2.54]) / 127).tolist()
    assert codes[:256].tolist() == [round(v * 127 / 64) for v in values[:256].tolist()]
    assert codes[256:].tolist() == [127, 50, -1, 0, 0, 2]  # 0.03 is 1.5 scales: to even
    assert len(coded.data) == 64 + n


@pytest.mark.parametrize(
    "largest", [0.0, -0.0, 1e-45, 1e-38, 2.0**-119 * 0.99, 2.0**-119, 2.0**126]
)
@pytest.mark.parametrize("twin", TWINS)
def test_int8_loses_nothing_of_blocks_near_0_and_near_infinity(twin: str, largest: float) -> None:
    values = torch.linspace(-1, 1, 256).mul_(largest)
    coded = code(TWINS[twin].Int8(), [(0, 256, None)], 1.0, values)
    assert torch.equal(coded.after.double() + coded.decoded.double(), values.double())
    assert largest >= 2.0**-119 or not coded.decoded.any()


@pytest.mark.parametrize("twin", TWINS)
def test_int8_takes_a_block_that_a_scale_cannot_hold_for_infinite(twin: str) -> None:
    values = torch.full((256,), torch.finfo(torch.float32).max)
    coded = code(TWINS[twin].Int8(), [(0, 256, values)], 1.0, torch.zeros(256))
    assert not coded.decoded.isfinite().any()
    assert not coded.after.any()


@pytest.mark.parametrize(
    "sources",
    [
        [],
        [(0, 9, None)],
        [(1, 10, None)],
        [(0, 5, torch.zeros(4)), (5, 10, None)],
        [(0, 10, torch.zeros(10).half())],
        [(0, 10, torch.zeros(20)[::2])],
    ],
    ids=["none", "too few", "a gap", "too short a source", "another dtype", "not contiguous"],
)
@pytest.mark.parametrize("twin", TWINS)
def test_sources_that_do_not_fill_their_places_are_our_bug(twin: str, sources: Any) -> None:
    for kind in KINDS.values():
        with pytest.raises(AssertionError):
            code(kind[twin], sources, 1.0, torch.zeros(10))


def test_the_compiled_kernels_serve() -> None:
    kinds = {name: type(codec) for name, codec in codecs.CODECS.items() if codec is not None}
    assert kinds == {"bf16": compiled.Bf16, "int8": compiled.Int8}
