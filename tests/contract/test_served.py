"""Workers and parameter servers train as one process on the whole batch does, at staleness 0."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.notified import make_notified
from paceline.algorithms.served.records import Kind, StepRecord
from paceline.comm.communicator import Communicator
from paceline.comm.peer_activities import Timeout
from paceline.errors import CommError, ConfigError, PeerLost
from paceline.reduce.put_engine import gradient_views, owner
from paceline.reduce.put_engine.layout import MESSAGE, BucketSpec, Topology, lay_out
from paceline.reduce.put_engine.messages import Messages
from paceline.update.updater import ELEMENTWISE, StepHyperparameters
from tests.harness.equivalence.case_models import normalised
from tests.harness.equivalence.case_steps import adam
from tests.harness.equivalence.equivalence_cases import CASES, training
from tests.harness.equivalence.exchange_state import Rank, same, sgd
from tests.harness.equivalence.large_batch import (
    State,
    Training,
    World,
    convnet,
    largest_difference,
)
from tests.harness.equivalence.put_synchronizers import notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.served_synchronizers import Served
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.network.window_kinds import LIMIT
from tests.harness.twins.mortal_window import Mortal
from tests.harness.twins.window import WindowGroup

TELLING = (
    *("usual", "unused parameters", "a path that depends on the step", "accumulated"),
    *("clipped by norm", "loss scaling, one step skipped", "a group added later", "sync_bn"),
)
BUCKET_BYTES = {"a parameter each": 1, "about 2 kB": 2_000, "whole model": 10**9}


@pytest.fixture(autouse=True)
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the owner sleep until it is woken, rather than look by itself now and then."""
    monkeypatch.setattr(owner, "_WAIT_SLICE_S", 1000.0)


@pytest.fixture
def all_borrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the small gradients of these models where they lie, as large ones are."""
    monkeypatch.setattr(gradient_views, "_SMALL", 16)


@cache
def alone(case: str) -> State:
    return CASES[case]().alone()


def chosen() -> Iterator[Any]:
    """Yield a case, numbers of workers and of servers, and a bucket size.

    Each case meets two numbers of workers, and the telling ones all four. A number of workers meets
    each number of servers, and each bucket size, in six cases that follow each other.
    """
    sizes = list(BUCKET_BYTES.items())
    for number, case in enumerate(CASES):
        for workers in (1, 2, 3, 4) if case in TELLING else (1 + number % 2, 3 + number % 2):
            servers = 1 + (number + workers) % 3
            name, size = sizes[(number + 2 * workers) % 3]
            text = f"{case}-{workers} workers-{servers} servers-{name}"
            yield pytest.param(case, workers, servers, size, id=text)


def train(case: Training, workers: int, served: Served, bucket_bytes: int = 2_000) -> list[State]:
    """Train until the servers have ended, too; return the workers' states."""
    states = case.on_threads(workers, bucket_bytes, served)
    served.join()
    return states


@pytest.mark.parametrize(("case", "workers", "servers", "bucket_bytes"), [*chosen()])
def test_workers_train_as_one_process_does(
    case: str, workers: int, servers: int, bucket_bytes: int
) -> None:
    served = Served(servers, late=bool((workers + servers) % 2))
    first, *others = train(CASES[case](), workers, served, bucket_bytes)
    assert largest_difference(first, alone(case)) < 1e-10
    for other in others:
        assert largest_difference(first, other) == 0


@pytest.mark.parametrize("machines", [(2,), (2, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("case", ["usual", "unused parameters", "clipped by norm", "frozen later"])
def test_workers_of_a_machine_that_sum_first(case: str, machines: tuple[int, ...]) -> None:
    states = train(CASES[case](), sum(machines), Served(2, machines=machines))
    for state in states:
        assert largest_difference(state, alone(case)) < 1e-10


@pytest.mark.usefixtures("all_borrowed")
@pytest.mark.parametrize("case", ["usual", "clipped by norm", "optimizer's hooks", "sync_bn"])
def test_workers_and_servers_that_connect_by_tcp(case: str) -> None:
    for state in train(CASES[case](), 2, Served(2, tcp=True)):
        assert largest_difference(state, alone(case)) < 1e-10


@pytest.mark.parametrize("case", ["usual", "sync_bn", "clipped by norm", "a group added later"])
def test_two_runs_give_the_same_bits_however_late_puts_are(case: str) -> None:
    one, other = (train(CASES[case](), 3, Served(2, late=late))[2] for late in (False, True))
    assert largest_difference(one, other) == 0


def settle_and_freeze(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
    """Settle before each step, as an evaluation does; freeze all parameters for three steps."""
    model.eval()
    model.train()
    model.requires_grad_(number not in (3, 4, 5))


def step_what_is_trained(
    world: World, model: nn.Module, optimizer: Optimizer, x: torch.Tensor, y: torch.Tensor
) -> None:
    loss = F.cross_entropy(model(x), y)
    if loss.requires_grad:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("make_model", [convnet, normalised], ids=["plain", "statistics"])
def test_servers_own_nothing_while_all_parameters_are_frozen(
    make_model: Callable[[], nn.Module], staleness: int
) -> None:
    case = training(make_model, change=settle_and_freeze, make_step=lambda: step_what_is_trained)
    states = train(case, 2, Served(2, staleness=staleness))
    if make_model is convnet:  # batch statistics are each worker's own
        assert largest_difference(states[0], case.alone()) < 1e-10
    assert largest_difference(*states) == 0


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_each_optimizer_whose_update_can_be_cut_trains_as_alone(kind: type[Optimizer]) -> None:
    case = training(convnet, make_optimizer=lambda model: kind(model.parameters(), lr=1e-3))
    for state in train(case, 2, Served(3)):
        assert largest_difference(state, case.alone()) < 1e-10


CHANGED = ("usual", "unfrozen later, Adam", "clipped by norm", "a group added later", "sync_bn")


@pytest.mark.parametrize("case", CHANGED)
def test_a_method_that_changes_in_mid_run_takes_the_optimizers_state_along(case: str) -> None:
    one, two = Served(1), Served(2)
    later = (None, (notified(False), 1), (two, 10**9), None, (one, 2_000), (two, 1))
    first, *others = CASES[case]().on_threads(3, 2_000, make_allreduce, later)
    one.join()
    two.join()
    assert largest_difference(first, alone(case)) < 1e-10
    for other in others:
        assert largest_difference(first, other) == 0


class WritingData:
    """Writes parameters where autograd doesn't count it: through `.data`, and an older alias."""

    def __init__(self) -> None:
        self.steps = 0
        self.alias: torch.Tensor | None = None

    def __call__(
        self, world: Any, model: nn.Module, optimizer: Optimizer, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        self.steps += 1
        first, *_, last = model.parameters()
        if self.alias is None:
            self.alias = last.data
        F.cross_entropy(model(x), y).backward()
        if self.steps % 2:
            first.data.clamp_(-0.1, 0.1)
        else:
            self.alias[1] += 0.5
        if self.steps == 3:
            last.data = last.data.clone()
            self.alias = last.data
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("workers", [1, 3])
def test_what_a_script_writes_to_parameters_goes_into_the_update(workers: int) -> None:
    case = training(convnet, make_step=WritingData)
    for state in train(case, workers, Served(2), 10**9):
        assert largest_difference(state, case.alone()) < 1e-10


def on_workers(work: Callable[[Rank], Any], served: Served, **more: Any) -> list[Any]:
    """Call `work` on each of two workers that are threads; return the results, by rank."""

    def run(c: Communicator) -> Any:
        rank = Rank(c, served, None, **more)
        result = work(rank)
        rank.close()
        return result

    return run_ranks(2, run)


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_the_servers_state_is_gathered_as_that_of_a_whole_optimizer(make_optimizer: Any) -> None:
    def work(rank: Rank) -> Any:
        for number in range(3):
            rank.train(number)
        return rank.state()

    found, none = on_workers(work, Served(2), make_optimizer=make_optimizer)
    puts = notified(False, (1, 1), kind=make_notified)
    expected, _ = on_workers(work, puts, make_optimizer=make_optimizer)  # type: ignore[arg-type]
    assert none == {"exchange": None}
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    for number, entries in expected["optimizer"]["state"].items():
        own = found["optimizer"]["state"][number]
        assert own.keys() == entries.keys()
        for name, value in entries.items():
            assert torch.allclose(own[name], value, atol=1e-5)
            assert own[name].stride() == value.stride()


def test_a_state_that_a_script_loads_goes_to_the_servers() -> None:
    def work(rank: Rank) -> Any:
        rank.train(0)
        states[rank.communicator.rank] = rank.state()
        rank.train(1)
        rank.communicator.all_reduce(torch.zeros(1)).wait("both states")
        start = states[0]["optimizer"]
        rank.optimizer.load_state_dict(copy.deepcopy(start))
        after = rank.state()
        if rank.communicator.rank == 0:
            assert same(after["optimizer"], start)

    states: dict[int, Any] = {}
    on_workers(work, Served(2))


def entries_of(ranges: Any) -> dict[str, Any]:
    return {name: {"range": [*entry[:2]], **entry[2]} for name, entry in ranges.items()}


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_a_worker_that_asks_late_gets_the_state_before_the_others_update(
    make_optimizer: Any,
) -> None:
    updated = threading.Event()

    def work(rank: Rank) -> None:
        rank.train(0)
        rank.replica.settle()
        before = rank.replica._binding.state.local(in_step=False)["optimizer"]
        first = rank.communicator.rank == 0
        with replica_step(rank.replica, 1, 0.5):
            rank.backward(1)
            rank.replica._binding.access.complete()
            if not first:
                assert updated.wait(LIMIT)
            now = rank.replica._binding.state.local()["optimizer"]
            if first:
                rank.optimizer.step()
                rank.replica.settle()
                updated.set()
            else:
                rank.optimizer.step()
        rank.replica.settle()
        assert same(entries_of(before), entries_of(now))
        after = rank.replica._binding.state.local(in_step=False)["optimizer"]
        assert not same(entries_of(before), entries_of(after))

    served = Served(2)
    on_workers(work, served, make_optimizer=make_optimizer)
    assert not any(server._copies for server in served.running)  # each has been fetched by all


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_a_worker_that_restores_its_part_late_leaves_the_others_alone(make_optimizer: Any) -> None:
    def work(rank: Rank, *, restores: bool) -> Any:
        rank.train(0)
        rank.train(1)
        rank.replica.settle()
        state = rank.replica._binding.state
        saved = copy.deepcopy(dict(state.local(in_step=False)))
        # As where members restore a snapshot: the new servers first get the state of a new
        # optimizer, which has no entries.
        empty = {name: (*entry[:2], {}) for name, entry in saved["optimizer"].items()}
        double = {
            name: (*entry[:2], {key: 2 * value for key, value in entry[2].items()})
            for name, entry in saved["optimizer"].items()
        }
        rank.communicator.all_reduce(torch.zeros(1)).wait("all parts")
        if restores:
            first = rank.communicator.rank == 0
            if not first:
                assert restored.wait(LIMIT)
            assert state.restore_local({**saved, "optimizer": double})
            assert same(entries_of(state.local()["optimizer"]), entries_of(double))
            assert state.restore_local({**saved, "optimizer": empty})
            assert state.restore_local(saved)
            assert same(entries_of(state.local()["optimizer"]), entries_of(saved["optimizer"]))
            if first:
                restored.set()
        rank.train(2)
        return rank.state()

    restored = threading.Event()
    undisturbed, _ = on_workers(
        lambda rank: work(rank, restores=False), Served(1), make_optimizer=make_optimizer
    )
    found, _ = on_workers(
        lambda rank: work(rank, restores=True), Served(1), make_optimizer=make_optimizer
    )
    assert same(found["optimizer"], undisturbed["optimizer"])


def test_an_optimizer_whose_update_cannot_be_cut_is_refused() -> None:
    def work(c: Communicator) -> None:
        with pytest.raises(ConfigError, match="server does not support Adafactor"):
            Rank(c, Served(1), None, make_optimizer=lambda m: torch.optim.Adafactor(m.parameters()))

    run_ranks(1, work)


def test_a_use_of_the_servers_state_is_refused() -> None:
    def work(rank: Rank) -> None:
        rank.train(0)
        with pytest.raises(ConfigError, match=r"sync='server', optimizer\.state would contain"):
            rank.optimizer.state[next(rank.model.parameters())]
        with pytest.raises(ConfigError, match=r"world\.checkpoint\(\)"):
            rank.optimizer.state_dict()

    on_workers(work, Served(1))


def test_the_loss_of_a_server_names_it() -> None:
    served = Served(1)

    def lose(rank: Rank) -> None:
        for number in range(1, 6):
            rank.train(number)

    def work(c: Communicator) -> None:
        rank = Rank(c, served, None)
        rank.train(0)
        rank.replica.settle()
        c.all_reduce(torch.zeros(1)).wait("both have the first step")
        if c.rank == 0:
            served.running[0].close()
        with pytest.raises(PeerLost, match="server 0"):
            lose(rank)
        c.all_reduce(torch.zeros(1)).wait("both have lost it")
        rank.replica.close()

    run_ranks(2, work)


def test_a_server_that_dies_while_it_gets_the_state_leaves_no_other_server_waiting() -> None:
    living, dying = Mortal(None), Mortal(1)  # it dies as it acknowledges the state
    mortals = {("worker", 0): living, ("server", 0): dying, ("server", 1): living}
    served = Served(2, mortals=mortals, limit=LIMIT / 2)

    def work(c: Communicator) -> None:
        with pytest.raises(PeerLost, match="server 0"):
            Rank(c, served, None)

    run_ranks(1, work)
    served.end()


def record(version: int = 1, optimizer: str = "SGD") -> StepRecord:
    model = nn.Linear(2, 2)
    own = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25), momentum=0.9)
    own.param_groups[0]["made_by"] = object()  # what a script adds stays where it is
    hyperparameters = StepHyperparameters.of(own)
    return StepRecord(
        version=version, optimizer=optimizer, param_groups=(0,), hyperparameters=hyperparameters
    )


def test_a_record_takes_hyperparameters_along_and_no_object() -> None:
    found = StepRecord.from_message(record().to_message())
    assert found.kind is torch.optim.SGD
    assert found.hyperparameters is not None
    (group,) = found.hyperparameters.groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.25, 0.9, False)
    assert "made_by" not in group
    sums = StepRecord(version=2, optimizer="SGD", param_groups=(0,), hyperparameters=None)
    assert StepRecord.from_message(sums.to_message()) == sums


def test_a_record_has_the_values_of_tensors_and_of_numpys_numbers() -> None:
    rate, beta = np.float32(0.9) ** 3, torch.tensor(0.75)
    group = {"lr": rate, "betas": (beta, np.float64(0.5)), "amsgrad": np.bool_(False)}
    step = StepHyperparameters(groups=(group,), scaling={})
    adam_record = StepRecord(version=1, optimizer="Adam", param_groups=(0,), hyperparameters=step)
    found = StepRecord.from_message(adam_record.to_message()).hyperparameters
    assert found is not None
    assert found.groups == ({"lr": float(rate), "betas": [0.75, 0.5], "amsgrad": False},)


def test_a_class_that_is_no_optimizer_is_refused() -> None:
    sums = StepRecord(version=1, optimizer="eval", param_groups=(), hyperparameters=None)
    with pytest.raises(CommError, match="'eval', which is unknown"):
        _ = StepRecord.from_message(sums.to_message()).kind


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (record(version=2).to_message(), "version 2 came after that of version 0"),
        (bytes([max(Kind) + 1]), "of the unknown kind"),
    ],
)
def test_a_server_refuses_what_does_not_belong_to_the_run(message: bytes, words: str) -> None:
    spec = BucketSpec(lengths=(20,), dtype=torch.float64, returns_parameters=True)
    layout = lay_out([spec], Topology.of((1,)).served_by("server 0"))
    served = Served(1)
    group = served.start(layout, (1,))
    messages = Messages(group.window(0), layout, Timeout(LIMIT, LIMIT))
    messages.send(1, message, "a test")
    with pytest.raises(CommError, match=words):
        served.join()


@pytest.mark.parametrize("size", [0, 1, MESSAGE - 8, MESSAGE - 7, 3 * MESSAGE])
def test_messages_of_all_lengths_arrive_in_order(size: int) -> None:
    spec = BucketSpec(lengths=(20,), dtype=torch.float32, returns_parameters=True)
    layout = lay_out([spec], Topology.of((1, 1)).served_by("server 0", "server 1"))
    group = WindowGroup(4, layout.server_size, layout.notifications)
    sent = [bytes(torch.arange(size).to(torch.uint8).tolist()), b"next"]
    found: list[bytes] = []

    def receive() -> None:
        messages = Messages(group.window(1), layout, Timeout(LIMIT, LIMIT))
        found.extend(messages.receive(2, "a test") for _ in sent)

    thread = threading.Thread(target=receive)
    thread.start()
    messages = Messages(group.window(2), layout, Timeout(LIMIT, LIMIT))
    for message in sent:
        messages.send(1, message, "a test")
    messages.wait_handled(1, "a test")
    thread.join()
    assert found == sent


def test_messages_and_acknowledgements_overtake_all_buckets() -> None:
    buckets = 3
    spec = BucketSpec(lengths=(20,), dtype=torch.float32, returns_parameters=True)
    layout = lay_out([spec] * buckets, Topology.of((1,)).served_by("server 0"))
    group = WindowGroup(2, layout.server_size, layout.notifications)
    window = group.window(0)
    put = window.put
    priorities = []

    def note(*arguments: Any) -> None:
        priorities.append(arguments[5])
        put(*arguments)

    window.put = note  # type: ignore[method-assign]
    messages = Messages(window, layout, Timeout(LIMIT, LIMIT))
    messages.send(1, b"a record", "a test")
    messages.acknowledge(1)
    assert len(priorities) == 2
    assert max(priorities) < -buckets
