"""Optimizers by name: what is made of flags, and what is refused before anything is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import pytorch_optimizer
import torch
from torch import nn

from paceline.cli.flags import parse
from paceline.config.train import TrainConfig
from paceline.errors import ConfigError
from paceline.wiring.model import check_optimizer, make_optimizer
from tests.harness.processes.bad_inputs import NULL, Bad, require_answer


def config_of(*words: str) -> TrainConfig:
    given = ["--train_data", "null", "--use_cpu", *words]
    return parse(TrainConfig, given, prog="paceline train", description="")


def check(*words: str) -> list[str]:
    config = config_of(*words)
    return check_optimizer(config.optim, config.sync, config.pipeline)


def test_the_default_is_caffe2s_sgd() -> None:
    optimizer = make_optimizer(nn.Linear(2, 2), config_of("--momentum", "0.8").optim, 32)
    assert type(optimizer) is torch.optim.SGD
    with_decay, without = optimizer.param_groups
    assert (with_decay["momentum"], with_decay["nesterov"], with_decay["lr"]) == (0.8, True, 0.1)
    assert (with_decay["weight_decay"], without["weight_decay"]) == (1e-4, 0)
    assert check() == []


def test_options_and_the_flags_of_all_optimizers_reach_the_class() -> None:
    options = "betas=(0.9, 0.95),eps=1e-6 amsgrad=True"
    flags = ("--optimizer", "AdamW", "--optimizer_options", options, "--weight_decay", "0.3")
    optimizer = make_optimizer(nn.Linear(2, 2), config_of(*flags).optim, 32)
    assert type(optimizer) is torch.optim.AdamW
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["amsgrad"]) == ((0.9, 0.95), 1e-6, True)
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.3)


def test_the_other_package_has_what_torch_lacks() -> None:
    flags = ("--optimizer", "lars", "--optimizer_options", "momentum=0.8 trust_coefficient=0.01")
    optimizer = make_optimizer(nn.Linear(2, 2), config_of(*flags).optim, 32)
    assert type(optimizer) is pytorch_optimizer.LARS
    assert optimizer.param_groups[0]["momentum"] == 0.8


def test_a_rate_far_from_the_optimizers_own_is_noted_where_none_was_chosen() -> None:
    assert check("--optimizer", "adamw") == [
        "--base_learning_rate 0.1 is 100 times the default of adamw, 0.001: give the rate that you "
        "want."
    ]
    assert check("--optimizer", "adamw", "--base_learning_rate", "0.01") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--optimizer adamww", "--optimizer adamww: there is no such .*did you mean adamw?"),
        (
            "--optimizer adamw --optimizer_options beta=1",
            "adamw has no .*did you mean betas?",
        ),
        (
            "--optimizer adamw --optimizer_options eps=small",
            "eps=small: the value must be",
        ),
        ("--optimizer adamw --optimizer_options fast", "options fast: must be names and values"),
        ("--optimizer adamw --optimizer_options eps=-1", r"can't be made .*Invalid epsilon value"),
        ("--optimizer adamw --optimizer_options lr=1", "lr: give it as --base_learning_rate"),
        ("--optimizer adamw --momentum 0.5", "--momentum 0.5: is of --optimizer sgd, and this run"),
        ("--optimizer lbfgs", "lbfgs can't make a step from gradients alone"),
        ("--optimizer adahessian", "adahessian can't make a step from gradients alone"),
        ("--optimizer kron", "kron draws random numbers in its steps"),
        ("--optimizer schedulefreesgd", "evaluates with other weights than it trains"),
        ("--optimizer scion", "has a state of more than tensors and plain values"),
        ("--optimizer lamb --sync server --num_servers 1", "server does not support Lamb, "),
        ("--optimizer lars --update sharded", "sharded does not support LARS, which is not known "),
        ("--optimizer muon --update sharded", "sharded does not support Muon, "),
        (
            "--optimizer lamb --stages 2 --microbatches 2 --num_workers 2",
            "--optimizer lamb: with --stages, a rank has a part of the model",
        ),
    ],
)
def test_a_wrong_optimizer_is_a_sentence_and_nothing_is_written(
    words: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    require_answer(Bad(command=NULL + words, message=f".*{said}.*"), tmp_path, capfd)


def test_without_the_other_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    monkeypatch.setattr("paceline.update.named_optimizers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[optimizers\]' brings many more"):
        check("--optimizer", "lamb")
