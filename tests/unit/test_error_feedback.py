"""Error feedback of one bucket: what the next version adds, whichever memory it begins with."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.codecs.merge_codecs import merge_codec
from paceline.reduce.put_engine.error_feedback import ErrorFeedback
from paceline.reduce.put_engine.layout import BucketSpec, Topology, lay_out
from tests.harness.reference.unencoded import Unencoded

NUMEL, HALF = 10_000, 4992
OTHERS, OWN = slice(0, HALF), slice(HALF, NUMEL)  # the shards of group 0, and of this group, 1
CODECS = ["bf16", "int8", "int4", "topk:0.02", "topk:0.1:4"]
every_codec = pytest.mark.parametrize("codec", CODECS)
every_decay = pytest.mark.parametrize("decay", [1.0, 0.95, 0.3])


def feedback_of(codec: str, return_codec: Codec | None = None, decay: float = 1.0) -> ErrorFeedback:
    spec = BucketSpec(
        lengths=(NUMEL,),
        dtype=torch.float32,
        codec=merge_codec(codec),
        return_codec=return_codec,
        error_decay=decay,
    )
    layout = lay_out([spec], Topology.of([1, 1]))
    assert layout.buckets[0].shard(0, 1) == OWN
    return ErrorFeedback(layout.buckets[0], 0, 1)


def gradient(step: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))


def version(feedback: ErrorFeedback, step: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Run a version; return this rank's encoded contribution, and its sums."""
    feedback.begin(scale)
    values, sums = gradient(step), torch.full((NUMEL - HALF,), 7.0)
    data = feedback.encode(0, [(0, HALF, values[OTHERS])], 0.5)
    theirs, fresh = gradient(1000 + step)[OWN], torch.zeros(NUMEL - HALF)
    encoded, _ = encode(feedback.codec, theirs, fresh)
    feedback.reduce(1, [encoded, None], [(0, len(sums), values[OWN])], 0.5, sums)
    return data.clone(), sums


def encode(codec: Codec, values: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return the encoded sum of both, and what it lost."""
    data, after = torch.zeros(codec.size(len(values)), dtype=torch.uint8), torch.zeros_like(values)
    codec.encode([(0, len(values), values)], 1.0, before, data, after)
    return data, after


@every_codec
@every_decay
@pytest.mark.parametrize("returned", [None, "int8", "fp32", "topk:0.3:4"])
def test_versions_add_the_decayed_residual_of_the_one_before(
    codec: str, decay: float, returned: str | None
) -> None:
    return_codec = Unencoded() if returned == "fp32" else returned and merge_codec(returned)
    feedback = feedback_of(codec, return_codec or None, decay)
    contributed, sums_lost = torch.zeros(HALF), torch.zeros(NUMEL - HALF)
    for step in range(4):
        data, sums = version(feedback, step)
        expected, contributed = encode(feedback.codec, 0.5 * gradient(step)[OTHERS], contributed)
        contributed = contributed * decay
        assert torch.equal(data, expected)
        theirs, total = gradient(1000 + step)[OWN], torch.zeros(NUMEL - HALF)
        encoded, _ = encode(feedback.codec, theirs, torch.zeros_like(theirs))
        feedback.codec.decode(encoded, total)
        total += 0.5 * gradient(step)[OWN]
        expected, sums_lost = encode(feedback.return_codec, total, sums_lost)
        sums_lost = sums_lost * decay
        assert torch.equal(feedback.data[1], expected)
        feedback.return_codec.decode(expected, total)
        assert torch.equal(sums, total)
        assert torch.equal(feedback.residual, torch.cat([contributed, sums_lost]))
    assert contributed.any()
    assert sums_lost.any() or returned == "fp32"


@every_codec
@every_decay
def test_an_abandoned_version_leaves_no_trace(codec: str, decay: float) -> None:
    plain, abandoning = feedback_of(codec, None, decay), feedback_of(codec, None, decay)
    for step in range(6):
        for again in range(step % 3):  # none, one, or two in a row
            version(abandoning, 500 + again)
            abandoning.abandon()
            assert torch.equal(abandoning.residual, plain.residual)
        assert_same(version(plain, step), version(abandoning, step))


@every_codec
@every_decay
def test_what_is_saved_continues_to_the_same_bits(codec: str, decay: float) -> None:
    for count, abandoned in product([1, 2, 3], [False, True]):
        first, second = feedback_of(codec, None, decay), feedback_of(codec, None, decay)
        for step in range(count):
            version(first, step)
        if abandoned:
            version(first, 500)
            first.abandon()
        second.restore(first.residual, first.scale, owned_by=None)
        for step in range(count, count + 3):
            assert_same(version(first, step), version(second, step))


@every_decay
def test_sums_that_are_encoded_later_have_the_return_codec(decay: float) -> None:
    feedback = feedback_of("topk:0.02", merge_codec("int8"), decay)
    lost = torch.zeros(NUMEL - HALF)
    for step in range(3):
        feedback.begin(1.0)
        sums, decoded = gradient(step)[OWN], torch.zeros(NUMEL - HALF)
        expected, lost = encode(feedback.return_codec, sums, lost)
        lost = lost * decay
        assert torch.equal(feedback.encode_sums(1, sums), expected)
        feedback.return_codec.decode(expected, decoded)
        assert torch.equal(sums, decoded)
    feedback.begin(1.0)
    sums = gradient(9)[OWN]
    feedback.complete_sums(1, sums)
    assert torch.equal(sums, gradient(9)[OWN] + lost)
    assert not feedback.residual[OWN].any()


def assert_same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
