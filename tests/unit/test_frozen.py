"""Frozen parameters: which match, what is said, and what is refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.models.frozen import fixed_norms, freeze
from tests.harness.processes.bad_inputs import NULL, Bad, require_answer


def net() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    return nn.ModuleDict({"stem": stem, "norm": nn.BatchNorm2d(4), "head": nn.Linear(4, 2)})


def test_patterns_freeze_what_they_match() -> None:
    model = net()
    note = freeze(model, ["stem.*", "norm.weight"])
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        *("norm.bias", "head.weight", "head.bias"),
    ]
    assert note == (
        "5 of 8 parameters are frozen; trained are 14 values in norm.bias, head.weight, head.bias. "
        "Frozen BatchNorm layers (1) keep their running statistics, and normalise by them."
    )
    assert fixed_norms(model, ["stem.*", "norm.weight"]) == (model["stem"][1],)


def test_blocks_that_are_compiled_later_have_the_same_names() -> None:
    model = net()
    assert isinstance(model, nn.ModuleDict)
    model["stem"] = torch.compile(model["stem"], backend="eager")
    assert len(fixed_norms(model, ["stem.1.*"])) == 1


def test_a_norm_without_parameters_follows_its_batches() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))
    assert fixed_norms(model, ["0.*"]) == ()
    assert fixed_norms(model, []) == ()


def test_without_patterns_nothing_is_frozen() -> None:
    model = net()
    assert freeze(model, []) == ""
    assert all(p.requires_grad for p in model.parameters())
    assert fixed_norms(model, []) == ()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--freeze layer9.*", r"--freeze layer9\.\*: matches no parameter .* are .*conv1"),
        ("--freeze *", r"--freeze \*: freezes all parameters, so that there is nothing to train;"),
        (
            "--freeze conv1.* --stages 2 --microbatches 2 --num_workers 2",
            r"--freeze conv1\.\*: doesn't go with --stages 2",
        ),
        ("--optimizer muon", "--optimizer muon can't be made .*only supports 2D parameters"),
    ],
)
def test_what_cannot_be_frozen_is_a_sentence_and_nothing_is_written(
    words: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = Bad(command=f"{NULL} --model resnet20 {words}", message=f".*{said}.*")
    require_answer(bad, tmp_path, capfd)
