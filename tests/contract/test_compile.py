"""Compiled blocks: the same numbers, names and waits; hooks stay outside."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn import functional as F

from paceline.errors import ConfigError
from paceline.models.compiled_blocks import blocks
from paceline.replica.compiled_modules import (
    check_compiler,
    compile_blocks,
    is_compiled,
    visible_modules,
)
from paceline.replica.replica import Replica
from paceline.update.batch_norm import BatchShare, convert_sync_batchnorm
from tests.harness.equivalence.large_batch import (
    Training,
    largest_difference,
    made_up_batches,
    replicate,
    sgd,
)
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.worlds import run_of
from tests.harness.twins.communicator import ThreadGroup

# Warnings of torch.compile's own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.BatchNorm1d(outputs) if norm else nn.LayerNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x)).relu()
        return y


def net(*, norm: bool = False) -> nn.Module:
    """Three blocks in a row between other layers, in float64."""
    torch.manual_seed(3)
    body = nn.Sequential(*(Block(n, 16, norm=norm) for n in (12, 16, 16)))
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 12), nn.Sequential(body), nn.Linear(16, 10)
    ).double()


def trained(
    model: nn.Module,
    training: Training,
    replica: Replica,
    optimizer: Any,
    *,
    evaluates: bool = True,
) -> None:
    """Train on the whole batches, with an evaluation between."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, training.gamma)
    for number, (x, y) in enumerate(training.batches):
        training.change(model, optimizer, number, 0)
        with replica_step(replica, number, 1.0):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        if number == 2 and evaluates:
            model.eval()
            model(x)
            model.train()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "sync_bn"])
def test_compiled_blocks_train_as_others_do(backend: str, norm: bool) -> None:
    training = Training.of(net(norm=norm), steps=6)
    model, share = copy.deepcopy(training.model), BatchShare()
    names = list(model.state_dict())
    optimizer = sgd(model)
    if norm:
        model = convert_sync_batchnorm(model, run_of(), share)
    compile_blocks(blocks(model), backend)
    communicator = ThreadGroup(1).communicator(0)
    replica = replicate(model, optimizer, communicator, 500, share=share)
    trained(model, training, replica, optimizer)
    assert list(model.state_dict()) == names
    assert largest_difference(model.state_dict(), training.alone()) < 1e-10


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_torchs_own_compiler_trains_as_eager_does() -> None:
    training = replace(Training.of(net()), batches=made_up_batches([4, 4]))
    model = copy.deepcopy(training.model)
    optimizer = sgd(model)
    compile_blocks(blocks(model)[:1])
    replica = replicate(model, optimizer, ThreadGroup(1).communicator(0), 500)
    trained(model, training, replica, optimizer, evaluates=False)
    assert largest_difference(model.state_dict(), training.alone()) < 1e-10


def compile_parts(model: nn.Module) -> nn.Module:
    for block in blocks(model):
        block.compile(backend="aot_eager")
    return model


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def compile_around(model: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(model, backend="aot_eager")
    return compiled  # type: ignore[no-any-return]


@pytest.mark.parametrize("compiled", [compile_parts, compile_in_place, compile_around])
def test_what_users_compiled_themselves_trains_as_others_do(compiled: Any) -> None:
    training = Training.of(net(), steps=5)
    model: nn.Module = compiled(copy.deepcopy(training.model))
    optimizer = sgd(model)
    replica = replicate(model, optimizer, ThreadGroup(1).communicator(0), 500)
    trained(model, training, replica, optimizer)
    state = {n.removeprefix("_orig_mod."): v for n, v in model.state_dict().items()}
    replica.close()
    assert largest_difference(state, training.alone()) < 1e-10


def test_each_block_waits_for_its_own_buckets_from_the_second_step_on() -> None:
    model = net()
    optimizer = sgd(model)
    compile_blocks(blocks(model), "aot_eager")
    communicator = ThreadGroup(1).communicator(0)
    communicator.world_size = 2  # in a world of one nothing waits
    replica = replicate(model, optimizer, communicator, 1)
    synchronizer = replica._binding.synchronizer
    events: list[tuple[str, object]] = []
    before_read, gradient_ready = synchronizer.before_read, synchronizer.gradient_ready

    def read(bucket: Any) -> None:
        events.append(("read", bucket.parameters[0]))
        before_read(bucket)

    def ready(bucket: Any) -> None:
        events.append(("ready", bucket.parameters[0]))
        gradient_ready(bucket)

    synchronizer.before_read, synchronizer.gradient_ready = read, ready  # type: ignore[method-assign]
    (x, y), *_ = Training.of(model).batches
    for number in range(2):
        events.clear()
        with replica_step(replica, number, 1.0):
            F.cross_entropy(model(x), y).backward()
            ready_in_backward = [p for what, p in events if what == "ready"]
            optimizer.step()
            optimizer.zero_grad()
    parameters = list(model.parameters())
    reads = [p for what, p in events if what == "read"]
    by_layer = [parameters[:2], *(parameters[i : i + 4] for i in (2, 6, 10)), parameters[14:]]
    for layer in by_layer:  # each layer's, before the next layer's
        assert {id(p) for p in reads[: len(layer)]} == {id(p) for p in layer}
        reads = reads[len(layer) :]
    assert {id(p) for p in ready_in_backward} == {id(p) for p in parameters}  # none left to `end`


def test_a_copy_of_a_compiled_model_is_itself() -> None:
    model = net()
    compile_blocks(blocks(model), "aot_eager")
    replica = replicate(model, sgd(model), ThreadGroup(1).communicator(0), 500)
    x = torch.randn(2, 192, dtype=torch.float64)
    before = model(x)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for p in average.parameters():
            p.zero_()
    assert torch.equal(average(x), torch.zeros_like(before))
    assert torch.equal(model(x), before)
    replica.close()


def test_nobody_looks_inside_a_compiled_module() -> None:
    model = net()
    compile_blocks(blocks(model), "eager")
    seen = list(visible_modules(model))
    assert [m for m in seen if is_compiled(m)] == blocks(model)
    assert not any(isinstance(m, nn.LayerNorm) for m in seen)


def test_a_failing_compiler_is_a_sentence() -> None:
    def broken(graph: object, inputs: object) -> None:
        raise RuntimeError("no such compiler: g++-99")

    model = net()
    compile_blocks(blocks(model), broken)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"--compile: torch.compile failed .*g\+\+-99.*without"):
        model(torch.randn(2, 192, dtype=torch.float64))


def test_a_missing_compiler_is_a_sentence() -> None:
    nowhere = {"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}
    with (
        inductor_config.patch(nowhere),
        pytest.raises(
            ConfigError, match=r"--compile: .*no-such-compiler.*install a C\+\+ compiler"
        ),
    ):
        check_compiler()


def test_a_change_of_what_is_trained_is_noticed_by_the_compiled_too() -> None:
    def freeze(model: Any, optimizer: object, number: int, rank: int) -> None:
        if number == 2:
            model[2].requires_grad_(False)

    training = Training.of(net(), steps=5, change=freeze)
    model = copy.deepcopy(training.model)
    optimizer = sgd(model)
    compile_blocks(blocks(model), "aot_eager")
    replica = replicate(model, optimizer, ThreadGroup(1).communicator(0), 500)
    trained(model, training, replica, optimizer)
    assert largest_difference(model.state_dict(), training.alone()) < 1e-10
