"""The codecs of merges: what int4 and topk write, what topk keeps, and how a text names them."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.codecs.codecs import CODECS
from paceline.codecs.kernels import compiled_int4, compiled_topk
from paceline.codecs.kernels.compiled_topk import CHUNK, TopK
from paceline.codecs.merge_codecs import MERGE_CODECS, merge_codec, return_codec
from paceline.config.world import CHOICES
from paceline.errors import ConfigError
from tests.harness.equivalence.codec_memory import Coded, code, same_bits
from tests.harness.reference import plain_int4, plain_topk

every_int4 = pytest.mark.parametrize(
    "codec", [compiled_int4.Int4(), plain_int4.Int4()], ids=["compiled", "plain"]
)
TopKKind = type[compiled_topk.TopK] | type[plain_topk.TopK]
every_topk = pytest.mark.parametrize("kind", [compiled_topk.TopK, plain_topk.TopK])


def encoded(codec: Codec, values: Tensor) -> Coded:
    return code(codec, [(0, len(values), None)], 1.0, values)


# int4


@every_int4
def test_int4_packs_two_halves_of_a_block(codec: Codec) -> None:
    values = torch.cat([torch.arange(-64, 64) / 16.0, torch.tensor([7.0, -7, 1.5, -2.5, 0])])
    coded = encoded(codec, values)
    scales, codes = coded.data[:8].view(torch.float32), coded.data[64:].int()
    assert scales.tolist() == [(torch.tensor(4.0) / 7).item(), 1.0]
    whole = torch.tensor([round(v * 7 / 4) for v in values[:128].tolist()], dtype=torch.int32)
    assert torch.equal(codes[:64] & 15, whole[:64] & 15)
    assert torch.equal(codes[:64] >> 4, whole[64:] & 15)
    short = [7, -7, 2, -2, 0]  # halves are rounded to even
    expected = [short[0] & 15 | (short[3] & 15) << 4, short[1] & 15, short[2]]
    assert codes[64:].tolist() == expected
    assert coded.decoded[128:].tolist() == short


@every_int4
@pytest.mark.parametrize("numel", [0, 1, 127, 128, 129, 300, 128 * 17])
def test_int4_takes_half_a_byte_and_a_scale_a_block(codec: Codec, numel: int) -> None:
    scales = -(-4 * -(-numel // 128) // 64) * 64
    assert codec.size(numel) == scales + -(-numel // 2)


@every_int4
@pytest.mark.parametrize("largest", [0.0, -0.0, 1e-45, 2.0**-119 * 0.99, 2.0**-119, 2.0**126])
def test_int4_loses_nothing_of_blocks_near_0_and_near_infinity(
    codec: Codec, largest: float
) -> None:
    values = torch.linspace(-1, 1, 128).mul_(largest)
    coded = encoded(codec, values)
    assert torch.equal(coded.after.double() + coded.decoded.double(), values.double())
    assert largest >= 2.0**-119 or not coded.decoded.any()


# topk


def reference(values: Tensor, fraction: Fraction) -> list[int]:
    """Return the indices of what is kept of a chunk: the largest, of equals the first, no zeros."""
    count = -(-len(values) * fraction.numerator // fraction.denominator)
    magnitudes = values.abs().tolist()
    order = sorted(range(len(values)), key=lambda i: (-magnitudes[i], i))
    return sorted(i for i in order[:count] if magnitudes[i])


def indices_in(data: Tensor, kept: int) -> list[int]:
    """Read the indices of a single chunk, 12 bits each."""
    packed = int.from_bytes(bytes(data[8 : 8 + (3 * kept + 1) // 2].tolist()), "little")
    return [packed >> 12 * j & 4095 for j in range(kept)]


@every_topk
@settings(max_examples=150)
@given(
    numel=st.integers(1, 3 * CHUNK),
    levels=st.integers(1, 5000),
    zeros=st.floats(0, 1),
    fraction=st.fractions(Fraction(1, 500), Fraction(1, 2), max_denominator=500),
    bits=st.sampled_from([2, 4]),
    seed=st.integers(0, 2**32),
)
def test_topk_keeps_the_largest_and_of_equals_the_first(
    kind: TopKKind,
    numel: int,
    levels: int,
    zeros: float,
    fraction: Fraction,
    bits: int,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(-levels, levels + 1, (numel,), generator=random).float() / 7
    values[torch.rand(numel, generator=random) < zeros] = 0
    coded = encoded(kind(fraction=fraction, bits=bits), values)
    for chunk, decoded, after in zip(
        values.split(CHUNK), coded.decoded.split(CHUNK), coded.after.split(CHUNK), strict=True
    ):
        kept = reference(chunk, fraction)
        inside = torch.zeros(len(chunk), dtype=torch.bool)
        inside[kept] = True
        assert not decoded[~inside].any()
        assert same_bits(after[~inside], chunk[~inside])
        assert (decoded[kept].sign() == chunk[kept].sign()).all()


@every_topk
@settings(max_examples=100)
@given(
    numel=st.integers(0, 3 * CHUNK),
    fraction=st.fractions(Fraction(1, 5000), Fraction(1, 2), max_denominator=5000),
    bits=st.sampled_from([2, 4]),
)
def test_topk_takes_12_bits_and_the_codes_of_what_it_keeps(
    kind: TopKKind, numel: int, fraction: Fraction, bits: int
) -> None:
    size = 0
    for length in [CHUNK] * (numel // CHUNK) + [numel % CHUNK] * (numel % CHUNK > 0):
        kept = -(-length * fraction.numerator // fraction.denominator)
        size += 8 + -(-12 * kept // 8) + -(-bits * kept // 8)
    assert kind(fraction=fraction, bits=bits).size(numel) == size


@every_topk
def test_topk_packs_indices_then_codes(kind: TopKKind) -> None:
    values = torch.zeros(CHUNK)
    places = [1, 0xABC - 1, 0xABC, 4000, 4095]
    values[places] = torch.tensor([3.0, -1.0, 1.0, -5.0, 4.0])
    codec = kind(fraction=Fraction(6, CHUNK), bits=2)  # room for one more
    data = encoded(codec, values).data
    assert data[:8].view(torch.float32).tolist() == [1.0, 3.0]  # means of 1, 1 and of 3, 5, 4
    assert indices_in(data, 6) == [*places, 0]
    codes = [1, 0 | 2, 0, 1 | 2, 1, 0]
    assert data[17:].tolist() == [sum(c << 2 * j for j, c in enumerate(codes[:4])), 1]


@every_topk
def test_topk_of_4_bits_divides_the_range_evenly(kind: TopKKind) -> None:
    values = torch.zeros(100)
    values[10:18] = torch.arange(2.0, 10)
    values[20:24] = torch.tensor([-9.0, -3.4, -3.6, 5.5])
    coded = encoded(kind(fraction=Fraction(12, 100), bits=4), values)
    assert coded.data[:8].view(torch.float32).tolist() == [2.0, 1.0]
    assert torch.equal(coded.decoded[10:18], values[10:18])
    assert coded.decoded[20:24].tolist() == [-9.0, -3.0, -4.0, 6.0]  # 3.5 steps: to even


@every_topk
@pytest.mark.parametrize("bits", [2, 4])
def test_topk_decodes_values_of_one_magnitude_exactly(kind: TopKKind, bits: int) -> None:
    for magnitude in (1.0, 0.1, 1e-30, 3e37):
        values = torch.full((5000,), magnitude)
        values[::3] *= -1
        coded = encoded(kind(fraction=Fraction("0.02"), bits=bits), values)
        kept = coded.decoded != 0
        assert int(kept.sum()) == 82 + 19
        assert torch.equal(coded.decoded[kept], values[kept])
        assert not coded.after[kept].any()


@every_topk
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("largest", [0.0, -0.0, 1e-45, 2.0**-119 * 0.99])
def test_topk_keeps_nothing_of_a_chunk_of_zeros_or_near_them(
    kind: TopKKind, bits: int, largest: float
) -> None:
    values = torch.linspace(-1, 1, 5000).mul_(largest)
    coded = encoded(kind(fraction=Fraction("0.02"), bits=bits), values)
    assert not coded.decoded.any()
    assert not coded.decoded.signbit().any()
    assert same_bits(coded.after, values)


@every_topk
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("place", [0, 1, CHUNK - 1])
def test_topk_ends_behind_the_last_value_that_is_not_zero(
    kind: TopKKind, bits: int, place: int
) -> None:
    values = torch.zeros(2 * CHUNK)
    values[place], values[CHUNK + place] = 3.0, -5.0
    coded = encoded(kind(fraction=Fraction("0.02"), bits=bits), values)
    assert torch.equal(coded.decoded, values)
    assert not coded.after.any()


@every_topk
@pytest.mark.parametrize("bits", [2, 4])
def test_topk_keeps_denormals_beside_others(kind: TopKKind, bits: int) -> None:
    values = torch.zeros(CHUNK)
    values[:3] = torch.tensor([1.0, -1e-45, 1e-40])
    coded = encoded(kind(fraction=Fraction("0.02"), bits=bits), values)
    assert indices_in(coded.data, 3) == [0, 1, 2]
    assert (coded.after + coded.decoded - values).abs().max() <= 2.0**-25


@every_topk
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 2.0**127])
def test_topk_loses_a_chunk_as_a_whole(kind: TopKKind, bad: float) -> None:
    values = torch.randn(2 * CHUNK + 10)
    values[CHUNK + 7] = bad
    coded = encoded(kind(fraction=Fraction("0.02")), values)
    assert coded.decoded[CHUNK : 2 * CHUNK].isnan().all()
    assert not coded.after[CHUNK : 2 * CHUNK].any()
    assert coded.decoded.isfinite().sum() == CHUNK + 10


@every_topk
def test_two_means_are_nearer_than_any_one_level(kind: TopKKind) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(50 * CHUNK, generator=random)
    coded = encoded(kind(fraction=Fraction("0.02")), values)
    kept = values[coded.decoded != 0]
    one_level = kept.abs().std()
    assert (coded.after[coded.decoded != 0].square().mean().sqrt() < 0.62 * one_level).item()


@settings(max_examples=100)
@given(
    numel=st.integers(0, 10 * CHUNK),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    name=st.sampled_from(["int4", "topk:0.02", "topk:0.02:4", "topk:0.31", "topk:0.0001:4"]),
    seed=st.integers(0, 2**32),
)
def test_the_kernels_equal_the_reference_over_many_chunks(
    numel: int, spread: float, name: str, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    values, before, theirs = torch.randn(3, numel, generator=random)
    values *= 10 ** (spread * torch.rand(numel, generator=random) - spread / 2)
    quick = merge_codec(name)
    assert quick is not None
    slow: Codec = plain_int4.Int4()
    if isinstance(quick, TopK):
        slow = plain_topk.TopK(fraction=quick.fraction, bits=quick.bits)
    ours = [(0, numel // 2, values[: numel // 2]), (numel // 2, numel, values[numel // 2 :])]
    part = encoded(slow, theirs).data
    assert torch.equal(encoded(quick, theirs).data, part)
    found = []
    for codec in (quick, slow):
        data, after, out = torch.zeros_like(part), torch.zeros(numel), torch.zeros(numel)
        codec.reduce([None, part, part], ours, 0.3, before, data, after, out)
        found.append((data, after, out))
    (data, after, out), others = found
    assert torch.equal(data, others[0])
    assert same_bits(after, others[1])
    assert same_bits(out, others[2])


# names


def test_a_text_names_a_codec() -> None:
    assert {name: merge_codec(name) for name in MERGE_CODECS} == MERGE_CODECS
    assert list(MERGE_CODECS) == [*CODECS, "int4"]
    for text, fraction, bits in (
        ("topk:0.02", "0.02", 2),
        ("topk:0.02:2", "0.02", 2),
        ("topk:.5:4", "0.5", 4),
    ):
        assert merge_codec(text) == compiled_topk.TopK(fraction=Fraction(fraction), bits=bits)
    assert merge_codec("topk:0.07").size(100) == 8 + 11 + 2  # type: ignore[union-attr] # 7 are kept


def test_gradients_have_no_codec_of_merges() -> None:
    assert not {"int4", "topk"} & {*CODECS, *CHOICES["wire"]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int5", "--wire int5 is not a codec of merges; choose one of fp32, bf16, int8, int4, or"),
        ("topk", "--wire topk is not a codec of merges"),
        ("topk:0.1:2:3", "--wire topk:0.1:2:3 is not a codec of merges"),
        ("", "--wire  is not a codec of merges"),
        ("topk:", "asks for no part of the values"),
        ("topk:0", "asks for 0 of the values, but topk sends a fraction above 0 and at most 0.5"),
        ("topk:0.51", "asks for 0.51 of the values"),
        ("topk:-0.1", "asks for -0.1 of the values"),
        ("topk:nan", "asks for nan of the values"),
        ("topk:1e-2", "asks for 1e-2 of the values"),
        ("topk:1/50", "asks for 1/50 of the values"),
        ("topk:٠.١", "asks for ٠.١ of the values"),
        ("topk:0.02:3", "asks for values of 3 bits, but topk has 2 or 4; set topk:0.02:4, or"),
        ("topk:0.02:", "asks for values of no bits"),
    ],
)
def test_a_text_that_names_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        merge_codec(text)


def test_sums_of_topk_return_with_room_for_all_contributions() -> None:
    topk = merge_codec("topk:0.02")
    for groups in (2, 3, 10):
        expected = compiled_topk.TopK(fraction=groups * Fraction("0.02"), bits=4)
        assert return_codec(topk, groups) == expected
    assert return_codec(topk, 14) is MERGE_CODECS["int4"]
    assert return_codec(merge_codec("topk:0.5"), 2) is MERGE_CODECS["int4"]
    for codec in MERGE_CODECS.values():
        assert return_codec(codec, 3) is codec
