"""Weight decay pulls at the weights that Caffe2's trainer pulled at."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from paceline.models.weight_decay import decay_groups


def names(model: nn.Module, group: dict[str, Any]) -> list[str]:
    by_parameter = {p: name for name, p in model.named_parameters()}
    return [by_parameter[p] for p in group["params"]]


def small_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("norm_scale", "decayed"),
    [(True, ["0.weight", "1.weight", "2.weight"]), (False, ["0.weight", "2.weight"])],
)
def test_weights_decay_and_biases_do_not(norm_scale: bool, decayed: list[str]) -> None:
    model = small_model()
    with_decay, without = decay_groups(model, 1e-4, norm_scale=norm_scale)
    assert names(model, with_decay) == decayed
    assert with_decay["weight_decay"] == 1e-4
    assert set(names(model, without)) == {n for n, _ in model.named_parameters()} - set(decayed)
    assert without["weight_decay"] == 0


def test_a_group_without_parameters_is_left_out() -> None:
    assert len(decay_groups(nn.Linear(2, 2, bias=False), 1e-4, norm_scale=True)) == 1
