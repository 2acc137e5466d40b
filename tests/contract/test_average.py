"""Weight averaging by ranks as threads equals plain torch, whose workers run one after another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.algorithms.synchronizer import Weights
from paceline.cluster.supervision.stop_signals import StopSignals
from paceline.comm.communicator import Communicator
from paceline.data.order import Order
from paceline.errors import ConfigError, ReplicasDiffer
from paceline.run.steps import Steps
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.position import Position
from paceline.snapshots.schedule import SavePolicy
from paceline.snapshots.step_snapshots import StepSnapshots
from paceline.update.outer.average import Average
from paceline.update.outer.bmuf import BMUF
from paceline.update.outer.diloco import DiLoCo
from paceline.update.outer.easgd import EASGD
from paceline.update.outer.mean import Mean
from paceline.update.outer.outer_rule import OuterRule
from paceline.update.outer.sparseloco import SparseLoCo
from tests.harness.equivalence.averaging import (
    State,
    Task,
    Worker,
    by_plain_torch,
    cuts,
    momentum_sgd,
    net,
    on_ranks,
)
from tests.harness.equivalence.steps_by_hand import replica_step, run_step
from tests.harness.processes.worlds import run_of

CPU = torch.device("cpu")
RULES = [Mean(), EASGD(), BMUF(), DiLoCo(), SparseLoCo()]
ROUNDS: list[dict[str, Any]] = [
    {"every": 1},
    {"every": 3},
    {"every": 4, "delay": 3},
    {"every": 4, "delay": 2, "mix": 0.25},
    {"every": 4, "fragments": 3},
    {"every": 6, "fragments": 2, "delay": 2},
    {"every": ((0, 1), (5, 4))},
]


def train(worker: Worker, _: Communicator) -> tuple[list[list[str]], State, State]:
    worker.train(range(len(worker.task.cuts)))
    worker.replica.settle(Weights.MERGED)
    merged = worker.merged()
    return worker.fragments, merged, worker.own()


def require_same(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        expected = other[name].view_as(value)
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12, msg=name)


CASES = [
    (rounds, rule, workers)
    for rounds in ROUNDS
    for rule in RULES
    for workers in (1, 2, 3, 4)
    if (workers == 3 or (rounds == ROUNDS[-2] and isinstance(rule, DiLoCo)))
    and (rule.allows_delay or not rounds.get("delay"))
]


@pytest.mark.parametrize(("rounds", "rule", "workers"), CASES, ids=str)
def test_twenty_steps_equal_workers_in_plain_torch(
    rounds: dict[str, Any], rule: Any, workers: int
) -> None:
    task = Task(average=Average(outer=rule, **rounds), cuts=cuts(20, workers, seed=workers))
    results = on_ranks(task, train)
    fragments = results[0][0]
    assert len(fragments) == task.average.fragments
    merged, own = by_plain_torch(task, fragments)
    for rank, (_, found, weights) in enumerate(results):
        require_same(found, merged)
        require_same(weights, dict(own[rank]))
        assert all(torch.equal(found[name], results[0][1][name]) for name in found)


def plain_net() -> nn.Module:
    """Make a net without running statistics."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer with three momenta and a step count."""
    return torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.8, 0.9), amsgrad=True)


MOMENTA = {
    momentum_sgd: {"momentum_buffer": 0.8},
    amsgrad: {"exp_avg": 0.8, "exp_avg_sq": 0.9, "max_exp_avg_sq": 1.0},
}


@pytest.mark.parametrize("make_optimizer", MOMENTA)
@pytest.mark.parametrize(
    "rounds", [{"every": 1}, {"every": 4}, {"every": 5, "delay": 3, "fragments": 2}], ids=str
)
def test_averaged_momenta_equal_those_of_workers_in_plain_torch(
    rounds: dict[str, Any], make_optimizer: Any
) -> None:
    def momenta(worker: Worker, communicator: Communicator) -> tuple[list[list[str]], State, State]:
        fragments, merged, own = train(worker, communicator)
        for name, p in worker.model.named_parameters():
            for entry in worker.task.momenta:
                merged[f"{entry} of {name}"] = worker.optimizer.state[p][entry]
        return fragments, merged, own

    task = Task(
        average=Average(outer="bmuf", momenta="average", **rounds),
        cuts=cuts(20, 3, seed=4),
        make_model=plain_net,  # BatchNorm's biases have gradients of 1e-17, which Adam scales to 1
        make_optimizer=make_optimizer,
        momenta=MOMENTA[make_optimizer],
    )
    results = on_ranks(task, momenta)
    merged, own = by_plain_torch(task, results[0][0])
    for rank, (_, found, weights) in enumerate(results):
        require_same({name: found[name] for name in merged}, merged)
        require_same(weights, dict(own[rank]))
        equal = [name for name in found if " of " in name]
        assert len(equal) == len(task.momenta) * len(own[rank])
        for name in equal:  # after a last merge without a delay
            torch.testing.assert_close(found[name], results[0][1][name], rtol=0, atol=1e-14)


def test_a_worker_without_an_update_begins_with_the_others_momenta() -> None:
    def states(worker: Worker, _: Communicator) -> list[Any]:
        worker.train(range(1))
        worker.replica.settle(Weights.MERGED)
        worker.model.train()
        return [worker.optimizer.state[p] for p in worker.model.parameters()]

    average = Average(every=2, momenta="average")
    task = Task(average=average, cuts=[[0, 0, 8]], make_optimizer=amsgrad)
    without, others = on_ranks(task, states)
    for one, other in zip(without, others, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[entry]) for entry, value in one.items())


@pytest.mark.parametrize(
    ("make_optimizer", "sentence"),
    [
        (
            torch.optim.SGD,
            "SGD with its present options has no momenta, such as a ",
        ),
        (torch.optim.LBFGS, "LBFGS was tried with a small parameter"),
        (torch.optim.SparseAdam, "SparseAdam was tried with a small parameter"),
    ],
)
def test_averaged_momenta_without_momenta_are_refused(make_optimizer: Any, sentence: str) -> None:
    task = Task(
        average=Average(momenta="average"),
        cuts=[[0, 8]],
        make_optimizer=lambda model: make_optimizer(list(model.parameters())),
    )
    with pytest.raises(ConfigError, match=f"--average_momenta average: {sentence}"):
        on_ranks(task, train)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_merging_after_each_step_of_sgd_equals_one_process(workers: int, momentum: float) -> None:
    task = Task(
        average=Average(every=1, momenta="average" if momentum else "keep"),
        cuts=cuts(20, workers, seed=7),
        make_model=plain_net,
        make_optimizer=lambda model: torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01
        ),
    )
    model = plain_net()
    optimizer = task.make_optimizer(model)
    for step in range(len(task.cuts)):
        x, y = task.batch(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for _, merged, own in on_ranks(task, train):
        require_same(merged, model.state_dict())
        require_same(own, model.state_dict())


@pytest.mark.parametrize("machines", [(2, 1), (2, 2), (1, 1, 1)])
@pytest.mark.parametrize("wire", ["bf16", "int8", "int4", "topk:0.1:4"])
def test_a_lossy_wire_follows_the_exact_merges(wire: str, machines: tuple[int, ...]) -> None:
    def net32() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 4))

    workers = sum(machines)
    task = Task(
        average=Average(every=2, fragments=2),
        cuts=cuts(24, workers, seed=2),
        make_model=net32,
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.3),
        machines=machines,
        wire=wire,
        dtype=torch.float32,
    )
    results = on_ranks(task, train)
    merged, _ = by_plain_torch(task, results[0][0])
    for _, found, _ in results:
        for name, value in found.items():
            assert torch.equal(value, results[0][1][name])
            near = 0.3 if wire.startswith("topk") else 0.05 if wire == "int4" else 0.02
            torch.testing.assert_close(value, merged[name].view_as(value), rtol=0, atol=near)


def net_of_views() -> nn.Module:
    """Make a net whose parameters are views of one tensor, with one version counter."""
    model = net()
    values = [p.detach() for p in model.parameters()]
    views = torch.cat([v.flatten() for v in values]).split([v.numel() for v in values])
    for (name, p), view in zip(list(model.named_parameters()), views, strict=True):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(view.view_as(p)))
    return model


class PartlyTrained(nn.Sequential):
    """A net with a wide layer that no loss uses."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(6, 9), nn.Linear(9, 4), nn.Linear(9, 500))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self[1](self[0](x))
        return scores


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_weights_that_nobody_changed_do_not_travel(wire: str) -> None:
    def traffic(worker: Worker, _: Communicator) -> int:
        worker.train(range(4))
        sizes = worker.replica.rounds._exchange.traffic
        return sum(sent for sent, _ in sizes)

    def make() -> nn.Module:
        return PartlyTrained().double() if wire == "fp32" else PartlyTrained()

    task = Task(
        average=Average(every=2),
        cuts=cuts(4, 2),
        make_model=make,
        machines=(1, 1),
        wire=wire,
        dtype=torch.float64 if wire == "fp32" else torch.float32,
    )
    trained = 6 * 9 + 9 + 9 * 4 + 4
    for sent in on_ranks(task, traffic):
        assert 0 < sent < 3 * 8 * trained  # of 8 bytes a value, the shards' headers included


@pytest.mark.parametrize("make_model", [net, net_of_views])
def test_an_evaluation_changes_no_bit_of_the_workers_own_weights(
    make_model: Callable[[], nn.Module],
) -> None:
    def evaluate(worker: Worker, _: Communicator) -> State:
        for step in range(9):
            worker.train(range(step, step + 1))
            worker.model.eval()
            worker.model(torch.ones(2, 6, dtype=torch.float64))
            worker.model.state_dict()
            worker.model.train()
            worker.model.state_dict()
        return worker.own()

    def straight(worker: Worker, _: Communicator) -> State:
        worker.train(range(9))
        return worker.own()

    average = Average(every=4, delay=1, fragments=3)  # of one bucket or more
    task = Task(average=average, cuts=cuts(9, 2), make_model=make_model)
    for evaluated, plain in zip(on_ranks(task, evaluate), on_ranks(task, straight), strict=True):
        assert all(torch.equal(evaluated[name], plain[name]) for name in plain)


def test_parameters_that_are_written_while_the_merged_ones_show_are_refused() -> None:
    def write(worker: Worker, _: Communicator) -> None:
        worker.train(range(3))
        worker.model.eval()
        with torch.no_grad():
            next(worker.model.parameters()).zero_()
        worker.train(range(3, 4))

    task = Task(average=Average(every=2), cuts=cuts(5, 1))
    with pytest.raises(
        ConfigError, match=r"0\.weight or another parameter of its bucket was written"
    ):
        on_ranks(task, write)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("wire", ["fp32", "int8", "topk:0.1"])
def test_a_resume_in_mid_round_gives_the_same_bits(rule: Any, wire: str) -> None:
    delay = 2 if rule.allows_delay else 0
    momenta = "average" if isinstance(rule, DiLoCo) else "keep"
    average = Average(every=6, fragments=2, delay=delay, outer=rule, momenta=momenta)
    dtype = torch.float64 if wire == "fp32" else torch.float32

    def net_of() -> nn.Module:
        torch.manual_seed(3)
        layers = [nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 4)]
        return nn.Sequential(*layers).to(dtype)

    task = Task(average=average, cuts=cuts(20, 3), wire=wire, dtype=dtype, make_model=net_of)
    saved: dict[int, dict[str, Any]] = {}

    def before(worker: Worker, communicator: Communicator) -> State:
        for step in range(20):
            if step in stops and (state := worker.replica.state()) is not None:
                saved[step] = state
            worker.train(range(step, step + 1))
        return worker.own() | worker.merged()

    stops = range(1, 14, 2 if isinstance(rule, DiLoCo) else 6)
    straight = on_ranks(task, before)
    assert [*saved] == [*stops]
    for stop in stops:

        def after(worker: Worker, communicator: Communicator) -> State:
            assert worker.replica.restore(saved[stop])  # noqa: B023 - called before the next one
            worker.train(range(stop, 20))  # noqa: B023
            return worker.own() | worker.merged()

        for one, other in zip(straight, on_ranks(task, after), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one), stop


@pytest.mark.parametrize("mix", [None, 0.25])
def test_a_merge_at_once_after_a_resume_gives_the_same_bits(mix: float | None) -> None:
    saved: dict[str, Any] = {}

    def state(worker: Worker) -> State:
        momenta = {
            f"momentum of {name}": worker.optimizer.state[p]["momentum_buffer"].clone()
            for name, p in worker.model.named_parameters()
        }
        return worker.own() | worker.merged() | momenta

    def straight(worker: Worker, _: Communicator) -> State:
        worker.train(range(7))  # a merge is under way
        if (found := worker.replica.state()) is not None:
            saved.update(found)
        worker.replica.settle(Weights.MERGED)
        return state(worker)

    def resumed(worker: Worker, _: Communicator) -> State:
        assert worker.replica.restore(saved)
        worker.replica.settle(Weights.MERGED)
        return state(worker)

    average = Average(every=5, delay=4, mix=mix, momenta="average")
    task = Task(average=average, cuts=cuts(9, 2))
    for one, other in zip(on_ranks(task, straight), on_ranks(task, resumed), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_momenta_that_a_merge_resets_are_reset_by_a_merge_at_once() -> None:
    def work(worker: Worker, _: Communicator) -> int:
        worker.train(range(3))
        worker.replica.settle(Weights.MERGED)
        return len(worker.optimizer.state)

    assert on_ranks(Task(average=Average(momenta="reset"), cuts=cuts(5, 2)), work) == [0, 0]


def test_after_a_step_that_fails_the_model_may_have_the_merged_weights() -> None:
    def work(worker: Worker, _: Communicator) -> tuple[State, State]:
        worker.train(range(4))
        with suppress(KeyError), replica_step(worker.replica, 4, 1 / 2, 9):
            worker.task.train(worker.model, worker.optimizer, 4, worker.rank)
            raise KeyError
        assert worker.replica.rounds is not None
        anchors = {n: v.clone() for n, v in worker.replica.rounds.anchors().items()}
        return worker.merged(), anchors

    for merged, anchors in on_ranks(Task(average=Average(every=3), cuts=cuts(5, 2)), work):
        assert anchors
        for name, anchor in anchors.items():
            assert torch.equal(merged[name].flatten(), anchor)


class Remembers(OuterRule):
    """A rule whose state is the last mean itself."""

    def begin(self, anchor: Tensor) -> dict[str, Tensor]:
        return {"last": anchor}

    def merge(self, own: Tensor, anchor: Tensor, mean: Tensor, state: Any) -> Any:
        new = mean + 0.1 * (mean - state["last"])
        return new, new, {"last": mean}


def test_a_rules_state_may_be_one_of_its_inputs() -> None:
    task = Task(average=Average(every=3, outer=Remembers()), cuts=cuts(20, 2))
    (fragments, merged, _), _ = on_ranks(task, train)
    require_same(merged, by_plain_torch(task, fragments)[0])


class TwoValues(OuterRule):
    """A rule that returns no state."""

    def merge(self, own: Tensor, anchor: Tensor, mean: Tensor, state: Any) -> Any:
        return mean, mean


class Scalar(OuterRule):
    """A rule whose state is a number."""

    def begin(self, anchor: Tensor) -> Any:
        return {"count": 0}


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (TwoValues(), r"The outer rule TwoValues must return a tuple: own weights, anchor, state"),
        (Scalar(), r"The outer rule Scalar must return a state by name, of tensors"),
    ],
)
def test_an_outer_rule_with_other_results_is_refused(rule: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        on_ranks(Task(average=Average(every=2, outer=rule), cuts=cuts(5, 1)), train)


def test_fewer_workers_resume_with_the_merged_weights() -> None:
    saved: dict[str, Any] = {}

    def before(worker: Worker, communicator: Communicator) -> State:
        worker.train(range(5))
        if (state := worker.replica.state()) is not None:
            saved.update(state)
        return worker.merged()

    def after(worker: Worker, communicator: Communicator) -> State:
        assert not worker.replica.restore(saved)
        return worker.own()

    average = Average(every=2)
    merged = on_ranks(Task(average=average, cuts=cuts(6, 3)), before)[0]
    for own in on_ranks(Task(average=average, cuts=cuts(6, 2)), after):
        assert all(torch.equal(value, merged[name]) for name, value in own.items())


def test_a_flipped_bit_of_the_merged_weights_ends_the_run() -> None:
    flipped = 5

    def steps_of(worker: Worker, communicator: Communicator) -> None:
        run = run_of(communicator)
        objects = StateObjects(model=worker.model, optimizer=worker.optimizer)
        snapshots = StepSnapshots(run, worker.replica, objects, enabled=False)
        steps = Steps(
            worker.replica,
            run,
            None,
            seed=5,
            position=Position(),
            policy=SavePolicy(),
            requests=StopSignals(),
            snapshots=snapshots,
        )
        order = Order(size=600, batch_size=12)
        for number in range(40):
            place = order.place(0, number, communicator.rank, communicator.world_size)
            with run_step(steps, place):
                worker.task.train(worker.model, worker.optimizer, number, communicator.rank)
            if number == flipped and communicator.rank == 1:
                name = next(iter(worker.replica.rounds.anchors()))
                worker.replica.rounds.anchors()[name][0] += 1e-13
        raise AssertionError("nothing noticed it")

    average = Average(every=3, outer=DiLoCo(), delay=1)
    task = Task(average=average, cuts=[[0, 6, 12]] * 40)
    with pytest.raises(ReplicasDiffer, match=r"0\.weight|3\.|4\."):
        on_ranks(task, steps_of)


def test_a_parameter_that_an_earlier_start_did_not_train_resumes_with_the_models_value() -> None:
    saved: dict[str, Any] = {}

    def before(worker: Worker, communicator: Communicator) -> State:
        worker.train(range(3))
        if (state := worker.replica.state()) is not None:
            for part in (state["average"]["merged"]["anchor"], *state["average"]["workers"]):
                part.get("own", part).pop("4.bias")
            saved.update(state)
        return worker.own()

    def after(worker: Worker, communicator: Communicator) -> tuple[State, State]:
        present = worker.own()
        worker.replica.restore(saved)
        return present, worker.own()

    task = Task(average=Average(every=4), cuts=cuts(6, 2))
    trained = on_ranks(task, before)
    for (present, resumed), own in zip(on_ranks(task, after), trained, strict=True):
        assert torch.equal(resumed["4.bias"], present["4.bias"])
        assert torch.equal(resumed["4.weight"], own["4.weight"])
