"""The learning rate over a run, against the values that the policies are known by."""

from __future__ import annotations

import math

import pytest

from paceline.run.learning_rate import LearningRate, base_rate


def test_step_policy_is_a_tenth_every_thirty_epochs() -> None:
    rate = LearningRate(policy="step", steps_per_epoch=10, epochs=90)
    assert [rate(step) for step in (0, 299)] == [1, 1]
    assert [rate(step) for step in (300, 600)] == pytest.approx([0.1, 0.01])


def test_cosine_policy_falls_by_half_a_cosine_to_zero() -> None:
    rate = LearningRate(policy="cosine", steps_per_epoch=10, epochs=10)
    assert [rate(step) for step in (0, 50, 100)] == pytest.approx([1, 0.5, 0])
    assert rate(25) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_the_rate_warms_up_linearly_to_its_base() -> None:
    rate = LearningRate(policy="cosine", steps_per_epoch=4, epochs=10, warmup_epochs=1)
    assert [rate(step) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert rate(40) == pytest.approx(0)


def test_the_linear_rule_scales_with_the_batch_of_all_machines() -> None:
    assert base_rate(0.1, 1024, scale=True) == pytest.approx(0.4)
    assert base_rate(0.1, 1024, scale=False) == 0.1
