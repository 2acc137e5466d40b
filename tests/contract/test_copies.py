"""A deep copy of a model or an optimizer is a plain one: it waits for nothing and sends nothing."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from paceline.comm.communicator import Communicator
from paceline.replica.compiled_modules import compile_blocks
from paceline.replica.pass_spans import watch_passes
from paceline.timeline.timeline import Timeline
from tests.harness.equivalence.case_models import normalised
from tests.harness.equivalence.large_batch import (
    Training,
    convnet,
    largest_difference,
    replicate,
    sgd,
)
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.twins.communicator import ThreadGroup

STEPS = 5
Make = Callable[[], nn.Module]


def plain() -> nn.Module:
    torch.manual_seed(1)
    return convnet()


def with_compiled_blocks() -> nn.Module:
    model = plain()
    compile_blocks([model[2], model[6]], "eager")  # type: ignore[index, list-item]
    return model


def compiled() -> nn.Module:
    model: Any = torch.compile(plain(), backend="eager")
    return model  # type: ignore[no-any-return]


KINDS = {"plain": plain, "compiled blocks": with_compiled_blocks, "compiled": compiled}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Make:
    return KINDS[request.param]


def bench_of(communicator: Communicator, model: nn.Module) -> Bench:
    """Bind a model itself, not a copy of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = replicate(model, optimizer, communicator, 2_000)
    return Bench(communicator, model, optimizer, replica, Training.of(model).batches)


def use(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Make a step, and call whatever has hooks, or is replaced, on a model that is exchanged."""
    model.train()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model.zero_grad(set_to_none=False)
    model.eval()
    with torch.no_grad():
        model(x)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def trained_alone(steps: int) -> dict[str, Tensor]:
    """Train by plain torch, on whole batches."""
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in Training.of(model).batches[:steps]:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("first", [0, 2])
def test_a_copy_trains_by_itself_within_the_originals_steps(make: Make, first: int) -> None:
    models = [make() for _ in range(2)]

    def train(communicator: Communicator) -> dict[str, Tensor]:
        bench = bench_of(communicator, models[communicator.rank])
        for number in range(first):
            bench.step(number)
        bench.replica.settle()
        own, alone = copy.deepcopy(bench.model), plain()
        for p, q in zip(alone.parameters(), own.parameters(), strict=True):
            p.data.copy_(q.data)
        optimizers = sgd(own), sgd(alone)
        for number in range(first, STEPS):
            with replica_step(bench.replica, number, 1 / communicator.world_size):
                use(own, optimizers[0], *bench.batches[number])
                bench.backward(number)
                use(own, optimizers[0], *bench.batches[number])
                assert bench.model.training
                bench.optimizer.step()
                use(own, optimizers[0], *bench.batches[number])
                bench.optimizer.zero_grad()
            for _ in range(3):
                use(alone, optimizers[1], *bench.batches[number])
        for p, q in zip(alone.parameters(), own.parameters(), strict=True):
            assert torch.equal(p, q)
        state = bench.model.state_dict()
        return {name.removeprefix("_orig_mod."): value for name, value in state.items()}

    for state in run_ranks(2, train):
        assert largest_difference(state, trained_alone(STEPS)) < 1e-10


@pytest.mark.parametrize("steps", [0, 2])
def test_a_copy_calls_no_synchronizer(
    make: Make, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(ThreadGroup(1).communicator(0), make())
    for number in range(steps):
        bench.step(number)
    own = copy.deepcopy(bench.model)
    called: list[str] = []
    for name in ("before_read", "gradient_ready", "settle", "wait_writable"):
        synchronizer = bench.replica._binding.synchronizer
        monkeypatch.setattr(synchronizer, name, lambda *_, name=name: called.append(name))
    with replica_step(bench.replica, steps, 1.0):
        called.clear()
        use(own, sgd(own), *bench.batches[0])
        assert called == []
        assert _get_current_dispatch_mode() is None  # nor is it traced
        assert bench.model.training
    bench.model(bench.batches[0][0])
    assert "before_read" in called  # the original does


def test_a_copy_keeps_nothing_of_the_original_alive(make: Make) -> None:
    bench = bench_of(ThreadGroup(1).communicator(0), make())
    bench.step(0)
    own = copy.deepcopy((bench.model, bench.optimizer))
    kept = [weakref.ref(each) for each in (bench.replica, bench.replica._binding.synchronizer)]
    bench.replica.close()
    del bench
    gc.collect()
    assert own
    assert [each() for each in kept] == [None, None]


class StateInDict(torch.optim.SGD):
    """An optimizer whose copies have all its attributes, a replaced `step` too."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()


@pytest.mark.parametrize("kind", [torch.optim.SGD, StateInDict])
def test_a_copy_of_an_optimizer_steps_its_own_model(kind: type[torch.optim.SGD]) -> None:
    model, alone = plain(), plain()
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    replica = replicate(model, optimizer, ThreadGroup(1).communicator(0), 2_000)
    plain_optimizer = kind(alone.parameters(), lr=0.1, momentum=0.9)
    x, y = Training.of(model).batches[0]
    own, own_optimizer = copy.deepcopy((model, optimizer))
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    with replica_step(replica, 0, 1.0):
        F.cross_entropy(model(x), y).backward()
        for each, its in ((own, own_optimizer), (alone, plain_optimizer)):
            use(each, its, x, y)
            scaler.scale(F.cross_entropy(each(x), y)).backward()
            scaler.step(its)
            scaler.update()
        assert not replica.ended
        optimizer.step()
    assert replica.ended
    assert largest_difference(own.state_dict(), alone.state_dict()) == 0.0
    assert len(own_optimizer.state) == len(plain_optimizer.state)


def test_a_pickled_model_and_its_optimizer_are_plain_ones() -> None:
    bench = bench_of(ThreadGroup(1).communicator(0), plain())
    bench.step(0)
    bench.replica.settle()
    file = io.BytesIO()
    torch.save(bench.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    model, optimizer = pickle.loads(pickle.dumps((bench.model, bench.optimizer)))
    for number in (1, 2):
        bench.step(number)
        x, y = bench.batches[number]
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference(model.state_dict(), trained_alone(3)) < 1e-10
    loaded.eval()
    assert bench.model.training
    assert largest_difference(loaded.state_dict(), trained_alone(1)) < 1e-10


def test_an_average_of_weights_is_that_of_plain_torch() -> None:
    def train(communicator: Communicator) -> dict[str, Tensor]:
        bench = bench_of(communicator, models[communicator.rank])
        bench.step(0)
        bench.replica.settle()
        average = AveragedModel(bench.model)
        for number in range(1, STEPS):
            bench.step(number)
            bench.replica.settle()
            average.update_parameters(bench.model)
            average.eval()
            average(bench.batches[0][0])
            assert bench.model.training
        return dict(average.module.state_dict())

    models = [plain() for _ in range(2)]
    averages = run_ranks(2, train)
    states = [trained_alone(steps) for steps in range(1, STEPS + 1)]
    # The first update copies; so the first state has no weight.
    mean = {name: sum(state[name] for state in states[1:]) / (STEPS - 1) for name in states[0]}
    for average in averages:
        assert largest_difference(average, mean) < 1e-10


def test_a_copy_has_the_methods_that_a_script_has_replaced() -> None:
    def nothing(set_to_none: bool = True) -> None:
        """Leave the gradients."""

    model = plain()
    model.zero_grad = nothing  # type: ignore[method-assign]
    bench = bench_of(ThreadGroup(1).communicator(0), model)
    assert vars(copy.deepcopy(bench.model))["zero_grad"] is nothing


def test_a_copy_of_a_copy_is_itself() -> None:
    bench = bench_of(ThreadGroup(1).communicator(0), plain())
    own = copy.deepcopy(bench.model)
    again = copy.deepcopy(own).eval()
    assert own.training
    assert not again.training


class Spans(Timeline):
    """Names of the spans that were measured."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def span(self, name: str, **fields: object) -> Any:
        self.names.append(name)
        return super().span(name, **fields)


def test_a_copys_passes_are_in_no_trace() -> None:
    model, spans = plain(), Spans()
    watch_passes(model, spans)
    x, y = Training.of(model).batches[0]
    own = copy.deepcopy(model)
    F.cross_entropy(own(x), y).backward()
    assert spans.names == []
    F.cross_entropy(model(x), y).backward()
    assert spans.names == ["forward", "backward"]


def test_one_rank_may_update_the_statistics_of_its_average_of_weights() -> None:
    torch.manual_seed(1)
    model = normalised()

    def run(c: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        bench = Bench.of(c, model)
        average = AveragedModel(bench.model)
        for number in range(3):
            with replica_step(bench.replica, number, 1 / c.world_size):
                bench.backward(number)
                bench.optimizer.step()
                bench.optimizer.zero_grad()
            average.update_parameters(bench.model)
        own = [value.clone() for value in average.module.buffers()]
        if c.rank == 0:
            update_bn([x for x, _ in bench.batches], average)
            assert not all(map(torch.equal, own, average.module.buffers()))
        bench.replica.settle()
        return [p.clone() for p in average.parameters()], [*bench.model.buffers()]

    (weights, statistics), (other_weights, other_statistics) = run_ranks(2, run)
    assert all(map(torch.equal, weights, other_weights))
    assert all(map(torch.equal, statistics, other_statistics))
