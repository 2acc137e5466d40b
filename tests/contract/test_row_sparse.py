"""Models with `sparse=True` embeddings train as in plain torch on the whole batch, to 1e-10.

Cases by numbers of ranks by methods. All have uneven shares and an empty one, and batches whose
ranks use different rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.sharded import make_sharded
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from paceline.reduce.buckets import partition
from paceline.replica.trained_parameters import TrainedParameters
from tests.harness.equivalence.large_batch import (
    State,
    Training,
    World,
    largest_difference,
    replicate,
)
from tests.harness.equivalence.put_synchronizers import in_threads, notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.twins.communicator import ThreadGroup

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of Adagrad itself

WORDS, CLASSES = 60, 5
Kind = Callable[..., Any]


class Bags(nn.Module):
    """Two tables, of words in their order and of bags of words, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4, sparse=True, padding_idx=0)
        self.bag = nn.EmbeddingBag(WORDS, 6, sparse=True, mode="sum")
        self.out = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.cat([self.words(x).mean(1), self.bag(x)], 1))
        return y


class Recurrent(nn.Module):
    """A table before an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6, sparse=True)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.lstm(self.words(x))[0][:, -1])
        return y


class Tables(nn.Module):
    """Nothing but tables; the second one is used only where the first word is an even one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(WORDS, CLASSES, sparse=True)
        self.second = nn.Embedding(WORDS, CLASSES, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x).sum(1)
        (even,) = torch.where(x[:, 0] % 2 == 0)
        return y.index_add(0, even, self.second(x[even]).sum(1)) if len(even) else y


class Tied(nn.Module):
    """A table that is the last layer's weight, too: its gradient is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6, sparse=True)
        self.out = nn.Linear(6, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.words(x).mean(1))
        return y[:, :CLASSES]


def batches() -> list[tuple[Tensor, Tensor]]:
    """Make up batches of sentences; those of 1 and 2 samples leave ranks with nothing."""
    random = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(0, WORDS, (n, 5), generator=random),
            torch.randint(0, CLASSES, (n,), generator=random),
        )
        for n in (7, 1, 12, 2, 7, 5)
    ]


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def adagrad(model: nn.Module) -> Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def sparse_adam(model: nn.Module) -> Optimizer:
    return torch.optim.SparseAdam(list(model.parameters()), lr=0.01)


class ByHand(torch.optim.SGD):
    """An optimizer of the user's, whose step waits for all gradients."""


def by_hand(model: nn.Module) -> Optimizer:
    return ByHand(model.parameters(), lr=0.1)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def accumulated(world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    parts = [part for part in torch.arange(len(x)).tensor_split(3) if len(part)]
    for part in parts:
        with world.no_sync() if part is not parts[-1] else nullcontext():
            (loss_of(model, x[part], y[part]) * len(part) / len(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


def rows_of(gradient: Tensor) -> Tensor:
    """View the values of a gradient, of a sparse one each row once."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def clipped(world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """Clip by the norm of all gradients, found in `.grad` after backward, without a word."""
    loss_of(model, x, y).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([rows_of(g).norm() for g in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(0.1 / norm)
    optimizer.step()
    optimizer.zero_grad()


def reduced(world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """Clamp the rows of the global mean, in gradients that replace the old ones."""
    loss_of(model, x, y).backward()
    world.reduce()
    for p in model.parameters():
        if p.grad is not None and p.grad.is_sparse:
            mean = p.grad.coalesce()
            p.grad = torch.sparse_coo_tensor(
                mean.indices(), mean.values().clamp(-0.01, 0.01), p.shape, check_invariants=True
            )
    optimizer.step()
    optimizer.zero_grad()


def two_passes(world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """Halve the gradients of a first backward, and add those of a second."""
    loss_of(model, x, y).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def penalised(world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """A penalty on whole tables makes their gradients dense."""
    penalty = torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()
    (loss_of(model, x, y) + 1e-2 * penalty).backward()
    optimizer.step()
    optimizer.zero_grad()


def zeroed(world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, x, y).backward()
    optimizer.step()


class Sometimes:
    """Every other step ends without an update."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(
        self, world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> None:
        self.steps += 1
        loss_of(model, x, y).backward()
        if self.steps % 2:
            optimizer.step()
        optimizer.zero_grad()


class Scaled:
    """Loss scaling; a step of which one sample's loss isn't finite is skipped."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        self.steps = 0

    def __call__(
        self, world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> None:
        self.steps += 1
        loss = F.cross_entropy(model(x), y, reduction="none")
        bad = self.steps == 3 and bool((x[0] == batches()[2][0][0]).all())  # the first sample's
        self.scaler.scale(loss.mean() * (torch.inf if bad else 1.0)).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()


def evaluated(world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """Train on what an evaluation returns, so that it must see all updates."""
    model.eval()
    with torch.inference_mode():
        found = float(model(batches()[2][0]).sum())
    model.train()
    (loss_of(model, x, y) * (1 + found**2)).backward()
    optimizer.step()
    optimizer.zero_grad()


def freeze(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
    """Train the tables in steps 0, 1, 4 and 5 only."""
    if number in (2, 4):
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.weight.requires_grad_(number == 4)


def training(make_model: Callable[[], nn.Module], make_optimizer: Any, **more: Any) -> Training:
    torch.manual_seed(11)
    return Training(make_model().double(), make_optimizer, batches(), **more)


CASES: dict[str, Callable[[], Training]] = {
    "bags, SGD": partial(training, Bags, sgd),
    "bags, momentum": partial(training, Bags, momentum),
    "bags, Adagrad": partial(training, Bags, adagrad),
    "bags, the user's optimizer": partial(training, Bags, by_hand),
    "LSTM": partial(training, Recurrent, momentum),
    "tables alone, SparseAdam": partial(training, Tables, sparse_adam),
    "tables alone, momentum": partial(training, Tables, momentum),
    "tied to a dense layer": partial(training, Tied, momentum),
    "accumulated": partial(training, Bags, adagrad, make_step=lambda: accumulated),
    "clipped by hand": partial(training, Bags, momentum, make_step=lambda: clipped),
    "reduced": partial(training, Bags, adagrad, make_step=lambda: reduced),
    "two backward passes": partial(training, Bags, adagrad, make_step=lambda: two_passes),
    "a penalty on all": partial(training, Bags, momentum, make_step=lambda: penalised),
    "gradients zeroed": partial(training, Bags, adagrad, make_step=lambda: zeroed),
    "steps without an update": partial(training, Bags, adagrad, make_step=Sometimes),
    "loss scaling, one step skipped": partial(training, Bags, adagrad, make_step=Scaled),
    "evaluated": partial(training, Bags, adagrad, make_step=lambda: evaluated),
    "frozen and unfrozen": partial(training, Bags, momentum, change=freeze),
}


def by_allreduce(world_size: int) -> Kind:
    rows = in_threads([world_size])

    def make(buckets: Any, communicator: Communicator, *parts: Any) -> Any:
        return make_allreduce(buckets, communicator, *parts, rows=rows(communicator.rank))

    return make


def by_puts(world_size: int, **more: Any) -> Kind:
    """Exchange by puts, but where there are tables alone."""
    rows = in_threads([world_size])
    puts, collectives = notified(True, rows=rows, **more), by_allreduce(world_size)

    def make(buckets: Sequence[Any], communicator: Communicator, *parts: Any) -> Any:
        kind = collectives if all(bucket.row_sparse for bucket in buckets) else puts
        return kind(buckets, communicator, *parts)

    return make


KINDS: dict[str, Callable[[int], Kind]] = {
    "allreduce": by_allreduce,
    "notified": by_puts,
    "notified, int8": partial(by_puts, codec="int8"),
    "staged": partial(by_puts, staged=True),
}


@cache
def alone(case: str) -> State:
    return CASES[case]().alone()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["allreduce", "notified"])
def test_ranks_train_as_one_process_does(name: str, case: str, world_size: int) -> None:
    states = CASES[case]().on_threads(world_size, 2_000, KINDS[name](world_size))
    for state in states:
        assert largest_difference(state, alone(case)) < 1e-10
        assert largest_difference(state, states[0]) == 0


@pytest.mark.parametrize("case", ["bags, momentum", "LSTM", "two backward passes"])
@pytest.mark.parametrize("name", ["notified, int8", "staged"])
def test_rows_are_exact_beside_other_exchanges(name: str, case: str) -> None:
    """In float64 no value is encoded; what is tested is that rows and buckets keep apart."""
    states = CASES[case]().on_threads(2, 2_000, KINDS[name](2))
    for state in states:
        assert largest_difference(state, alone(case)) < 1e-10


def test_a_lossy_wire_leaves_the_rows_as_they_are() -> None:
    """A table that reads no rounded value: its loss is its own."""
    torch.manual_seed(2)
    model = nn.ModuleDict({"table": nn.Embedding(WORDS, 3, sparse=True), "dense": nn.Linear(4, 4)})

    def train(communicator: Communicator, kind: Kind, *, whole: bool) -> State:
        own = copy.deepcopy(model)
        optimizer = momentum(own)
        replica = replicate(own, optimizer, communicator, 2_000, kind)
        for number, (x, _) in enumerate(batches()):
            rank, size = communicator.rank, communicator.world_size
            x = x.repeat(2, 1)  # both ranks have samples
            local = x if whole else x[rank::size]
            with replica_step(replica, number, len(local) / len(x)):
                dense = own["dense"](torch.ones(len(local), 4)).pow(2).mean()
                (own["table"](local).pow(2).mean() + dense).backward()
                optimizer.step()
                optimizer.zero_grad()
        return {name: value.clone() for name, value in own.state_dict().items()}

    expected = train(ThreadGroup(1).communicator(0), by_allreduce(1), whole=True)
    kind = KINDS["notified, int8"](2)
    for state in run_ranks(2, partial(train, kind=kind, whole=False)):
        table, dense = (float((state[n] - expected[n]).abs().max()) for n in state if "weight" in n)
        assert table < 1e-6 < dense


@pytest.mark.parametrize("name", ["allreduce", "notified"])
def test_one_rank_settles_alone_while_the_others_are_in_a_collective(name: str) -> None:
    """Each step has more rows than the one before, so that second messages follow the first."""
    torch.manual_seed(6)
    model = Bags().double()

    def train(communicator: Communicator, kind: Kind) -> State:
        own = copy.deepcopy(model)
        optimizer = adagrad(own)
        replica = replicate(own, optimizer, communicator, 2_000, kind)
        for number, count in enumerate((2, 5, 12)):
            x, y = (t[communicator.rank : count : 2] for t in batches()[2])
            with replica_step(replica, number, len(x) / count):
                loss_of(own, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if communicator.rank == 0:
                replica.settle()
            communicator.all_reduce(torch.ones(1)).wait("a collective of the script")
        return {name: value.clone() for name, value in own.state_dict().items()}

    one, other = run_ranks(2, partial(train, kind=KINDS[name](2)))
    assert largest_difference(one, other) == 0


@pytest.mark.parametrize("name", ["allreduce", "notified"])
def test_running_statistics_travel_beside_tables(name: str) -> None:
    """Both ranks have the whole batch, so that BatchNorm's statistics are those of one process."""
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.EmbeddingBag(WORDS, 4, sparse=True), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)
    ).double()

    def train(communicator: Communicator, kind: Kind) -> State:
        own = copy.deepcopy(model)
        optimizer = adagrad(own)
        replica = replicate(own, optimizer, communicator, 2_000, kind)
        for number, (x, y) in enumerate(batches()):
            if len(x) > 1:
                with replica_step(replica, number, 1 / communicator.world_size):
                    loss_of(own, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return {name: value.clone() for name, value in own.state_dict().items()}

    expected = train(ThreadGroup(1).communicator(0), by_allreduce(1))
    for state in run_ranks(2, partial(train, kind=KINDS[name](2))):
        assert largest_difference(state, expected) < 1e-10


@pytest.mark.parametrize(
    ("make_model", "make_optimizer", "expected"),
    [
        (Bags, sgd, {"words.weight", "bag.weight"}),
        (Bags, by_hand, {"words.weight", "bag.weight"}),
        (Bags, lambda m: torch.optim.Adam(m.parameters()), set()),
        (Tied, sgd, set()),
        (lambda: nn.Embedding(3, 3), sgd, set()),
    ],
    ids=["SGD", "the user's optimizer", "Adam", "tied", "sparse=False"],
)
def test_tables_with_sparse_gradients_are_found(
    make_model: Callable[[], nn.Module], make_optimizer: Any, expected: set[str]
) -> None:
    model = make_model()
    trained = TrainedParameters.of(model, make_optimizer(model))
    assert {trained.names[p] for p in trained.row_sparse} == expected
    buckets = partition(trained.names, trained.groups, 10**6, trained.row_sparse)
    assert {bucket.names[0] for bucket in buckets if bucket.row_sparse} == expected


def test_sharded_updates_are_refused() -> None:
    train = training(Bags, momentum)
    with pytest.raises(ConfigError, match=r"sharded does not support the sparse .* bag\.weight"):
        train.on_threads(1, 2_000, notified(False, (), "fp32", make_sharded))


def test_a_sparse_layer_that_came_after_the_start_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"words\.weight gets sparse gradients, but the"):
        training(Recurrent, momentum).on_threads(1, 2_000)


@pytest.mark.parametrize(
    ("make_optimizer", "said"),
    [
        (lambda m: torch.optim.Adam(m.parameters()), r"second\.weight is sparse, which .* SGD"),
        (
            lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1),
            r"SGD could not update \w+\.weight from its sparse gradient \(add\(sparse, dense\)",
        ),
    ],
)
def test_options_that_take_no_sparse_gradient_are_refused(make_optimizer: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        training(Tables, make_optimizer).on_threads(1, 2_000, by_allreduce(1))


def test_sparse_adam_refuses_a_dense_gradient() -> None:
    train = training(Tables, sparse_adam, make_step=lambda: penalised)
    with pytest.raises(ConfigError, match=r"SparseAdam could not update .* its dense gradient"):
        train.on_threads(1, 2_000, by_allreduce(1))


def test_sparse_adam_refuses_a_dense_layer() -> None:
    def make(model: nn.Module) -> Optimizer:
        return torch.optim.SparseAdam(list(model.parameters()))

    with pytest.raises(ConfigError, match=r"sparse gradients only, and out\.bias is not"):
        training(Recurrent, make).on_threads(1, 2_000, by_allreduce(1))


def test_a_gradient_is_the_global_mean_after_backward_and_after_the_step() -> None:
    """Of the rows that any rank used, also on a rank that used others."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(WORDS, 3, sparse=True)).double()

    def train(communicator: Communicator, kind: Kind) -> list[Tensor]:
        own = copy.deepcopy(model)
        optimizer, found = sgd(own), []
        replica = replicate(own, optimizer, communicator, 2_000, kind)
        (weight,) = own.parameters()
        for number, after in enumerate([False, True]):
            with replica_step(replica, number, [0.25, 0.75][communicator.rank]):
                own(torch.tensor([communicator.rank, 7])).sum().backward()
                if not after:
                    assert weight.grad is not None
                    found.append(weight.grad.to_dense())
                optimizer.step()
            if after:
                assert weight.grad is not None
                found.append(weight.grad.to_dense())
            optimizer.zero_grad()
        return found

    expected = torch.zeros(WORDS, 3, dtype=torch.float64)
    expected[0], expected[1], expected[7] = 0.25, 0.75, 1.0
    for found in run_ranks(2, partial(train, kind=by_allreduce(2))):
        for gradient in found:
            assert torch.equal(gradient, expected)
