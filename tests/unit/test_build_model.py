"""The flags about the model's arithmetic reach the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from paceline.cli.flags import parse
from paceline.config.model import ModelConfig
from paceline.config.train import TrainConfig
from paceline.config.world import SyncConfig
from paceline.errors import ConfigError
from paceline.models.resnet import BasicBlock
from paceline.replica.compiled_modules import is_compiled
from paceline.session.connect import connect_run
from paceline.update.batch_norm import BatchShare, SyncBatchNorm
from paceline.wiring.exchange import replicate
from paceline.wiring.model import make_model, make_optimizer, refuse_emulation
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.worlds import run_of, world_of

CPU = torch.device("cpu")


def config_of(*words: str) -> TrainConfig:
    base = ("--train_data", "null", "--model", "resnet18", "--use_cpu", "--timeout", "20")
    return parse(TrainConfig, [*base, *words], prog="paceline train", description="")


def kinds(model: nn.Module) -> set[type[nn.Module]]:
    return {type(m) for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def test_sync_bn_connects_the_layers_and_replaces_every_batch_norm() -> None:
    config = config_of("--sync_bn")
    run = connect_run(world_of(), HashStore(), CPU, (5.0, 5.0))
    model = make_model(config, CPU, run, BatchShare())
    assert kinds(model) == {SyncBatchNorm}
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, config.data.num_labels)
    run.context.close()


def test_without_the_flag_there_is_no_second_connection_and_no_replacement() -> None:
    config = config_of()
    assert kinds(make_model(config, CPU, None, BatchShare())) == {nn.BatchNorm2d}


def test_torchs_own_layers_are_replaced_without_the_flag_and_with_a_line() -> None:
    notes: list[str] = []
    config = config_of("--model", "tests.unit.test_build_model:synchronised")
    model = make_model(config, CPU, run_of(), BatchShare(), notes.append)
    assert kinds(model) == {SyncBatchNorm}
    assert notes == [
        "the model's SyncBatchNorm (1) normalises by the global batch, as with --sync_bn."
    ]
    config = config_of("--model", "tests.unit.test_build_model:synchronised", "--sync", "average")
    with pytest.raises(ConfigError, match=r"^1 is a SyncBatchNorm, but with --sync average"):
        make_model(config, CPU, run_of(), BatchShare())


def synchronised(num_labels: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.SyncBatchNorm(3), nn.Linear(3, num_labels))


def test_both_connections_of_one_store_are_apart() -> None:
    with connect_run(world_of(), HashStore(), CPU, (5.0, 5.0)) as run:
        context = run.context
        steps = context.group("data", "steps")
        layers = context.group("data", "layers")
        assert layers is not steps
        for communicator in (steps, layers):
            tensor = torch.ones(3)
            communicator.all_reduce(tensor).wait("a sum")
            assert torch.equal(tensor, torch.ones(3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's import
def test_compile_prepares_the_blocks() -> None:
    model: Any = make_model(config_of("--compile"), CPU)
    compiled = [m for m in model.modules() if is_compiled(m)]
    assert [type(m) for m in compiled] == [BasicBlock] * 8
    plain = make_model(config_of(), CPU)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert not any(is_compiled(m) for m in plain.modules())


WITHOUT = {"avx2": True, "avx512_bf16": False}
WITH = {"avx2": True, "avx512_bf16": True}


@pytest.mark.parametrize(
    ("kind", "capabilities", "device"),
    [("cpu", WITHOUT, "processor"), ("cuda", {"compute_capability": 7}, "GPU")],
)
def test_emulated_bfloat16_is_refused_with_both_ways_out(
    kind: str, capabilities: dict[str, object], device: str
) -> None:
    words = f"--dtype bfloat16: this {device} has no .*Remove .*--force_bfloat16"
    with pytest.raises(ConfigError, match=words):
        refuse_emulation(ModelConfig(dtype="bfloat16"), kind, capabilities)


def test_bfloat16_is_allowed_where_it_is_computed_or_insisted_on() -> None:
    refuse_emulation(ModelConfig(dtype="bfloat16"), "cpu", WITH)
    refuse_emulation(ModelConfig(dtype="bfloat16", force_bfloat16=True), "cpu", WITHOUT)
    refuse_emulation(ModelConfig(dtype="float16"), "cpu", WITHOUT)
    refuse_emulation(ModelConfig(), "cpu", WITHOUT)


def test_a_layer_trains_on_real_ranks_that_are_threads() -> None:
    """The pieces as a worker puts them together: layers' connection, share, replica."""
    config, share = config_of("--sync_bn"), BatchShare()
    model = make_model(config, CPU, run_of(), share)
    optimizer = make_optimizer(model, config.optim, 4)
    replica = replicate(model, optimizer, run_of(), SyncConfig(), share)
    with replica_step(replica, 0, 1.0):
        assert share.weight == 1.0
        model(torch.randn(2, 3, 32, 32)).sum().backward()
        optimizer.step()
    assert share.steps_begun == 1
    replica.close()
