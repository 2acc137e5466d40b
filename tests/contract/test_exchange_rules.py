"""The rules of a step (docs/concepts/step.md): broken on purpose, or watched by a communicator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.comm.communicator import Communicator, Ticket
from paceline.errors import ConfigError
from tests.harness.equivalence.case_models import Tied
from tests.harness.equivalence.large_batch import Training, convnet, largest_difference
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.twins.communicator import ThreadCommunicator, ThreadGroup


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return convnet()


class Watched:
    """A communicator that fails if memory that it holds is used, and keeps a diary.

    Attributes:
        events: "start" and "wait" of each sum, with the number of its values.
        late: no sum is there before it is waited for.
    """

    def __init__(self, inner: Communicator) -> None:
        self.rank, self.world_size = inner.rank, inner.world_size
        self._inner = inner
        self._held: list[Tensor] = []
        self.events: list[tuple[str, int]] = []
        self.late = False

    def all_reduce(self, tensor: Tensor) -> Ticket:
        for held in self._held:
            assert held.data_ptr() != tensor.data_ptr(), "sent again before it was acknowledged"
        self.events.append(("start", tensor.numel()))
        ticket = self._inner.all_reduce(tensor)  # leaves nothing but NaN in the memory
        self._held.append(tensor)
        return _WatchedTicket(self, tensor, ticket)

    def broadcast(self, tensor: Tensor) -> Ticket:
        return self._inner.broadcast(tensor)

    def end_startup(self) -> None:
        self._inner.end_startup()

    def close(self) -> None:
        self._inner.close()

    def return_sums(self, tensor: Tensor) -> None:
        assert tensor.isnan().all(), "written before it was acknowledged"
        self.events.append(("wait", tensor.numel()))
        self._held = [held for held in self._held if held is not tensor]


class _WatchedTicket:
    def __init__(self, watched: Watched, tensor: Tensor, ticket: Ticket) -> None:
        self._watched, self._tensor, self._ticket = watched, tensor, ticket

    def done(self) -> bool:
        return not self._watched.late and self._ticket.done()

    def wait(self, operation: str) -> None:
        self._watched.return_sums(self._tensor)
        self._ticket.wait(operation)


class PartlyCalled(nn.Module):
    """Two layers; in the first step both are called, later one alone, past the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
        self.extra = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.extra(self.body(x))
        return y


def test_memory_is_sent_again_only_after_it_came_back() -> None:
    torch.manual_seed(2)
    model = PartlyCalled().double()
    batches = Training.of(model).batches

    def forward(model: nn.Module, number: int, x: Tensor) -> Tensor:
        call: Callable[[Tensor], Tensor] = model if number < 2 else model.body  # type: ignore[assignment]
        return call(x)

    def train(communicator: Communicator) -> dict[str, Tensor]:
        bench = Bench.of(Watched(communicator), model, bucket_bytes=1)
        for number, (x, y) in enumerate(batches):
            local = slice(communicator.rank, None, 2)
            with replica_step(bench.replica, number, len(x[local]) / len(x)):
                F.cross_entropy(forward(bench.model, number, x[local]), y[local]).backward()
                bench.optimizer.step()
                bench.optimizer.zero_grad()
        return bench.model.state_dict()

    alone = PartlyCalled().double()
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for number, (x, y) in enumerate(batches):
        F.cross_entropy(forward(alone, number, x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference(run_ranks(2, train)[0], alone.state_dict()) < 1e-10


def diary_of_a_step(model: nn.Module, *, late: bool) -> tuple[list[tuple[str, int]], list[int]]:
    """Return what a step with a bucket for each parameter does, and the buckets' sizes."""
    communicator = ThreadCommunicator(ThreadGroup(1), 0)
    communicator.world_size = 2  # a world of one exchanges nothing
    watched = Watched(communicator)
    bench = Bench.of(watched, model, bucket_bytes=1)
    bench.step(0)
    bench.step(1)  # what is read where has been learned
    watched.events.clear()
    watched.late = late
    with replica_step(bench.replica, 2, 1.0):
        bench.backward(2)
        bench.optimizer.step()
    return watched.events, [p.numel() + 1 for p in bench.model.parameters()]  # a flag behind each


def test_a_layer_waits_for_its_own_bucket_and_for_nothing_else(model: nn.Module) -> None:
    events, sizes = diary_of_a_step(model, late=False)
    waits = [size for what, size in events if what == "wait"]
    assert sorted(waits) == sorted(sizes)
    assert waits[:2] == sizes[:2]  # the first layer's, first
    assert events[-len(sizes) :] == [("start", size) for size in reversed(sizes)]


def test_what_was_sent_before_a_late_bucket_is_updated_first(model: nn.Module) -> None:
    events, sizes = diary_of_a_step(model, late=True)
    waits = [size for what, size in events if what == "wait"]
    assert waits == sizes[::-1]  # in the order in which backward had sent them


def test_all_ranks_send_in_one_order_whatever_order_backward_takes() -> None:
    class TwoArms(nn.Module):
        """Takes its arms in an order of the rank's own."""

        def __init__(self) -> None:
            super().__init__()
            self.arms = nn.ModuleList([nn.Linear(192, 10), nn.Linear(192, 11)])

        def forward(self, x: Tensor, first: int) -> Tensor:
            outputs = {arm: self.arms[arm](x.flatten(1)) for arm in (first, 1 - first)}
            y: Tensor = outputs[0] + outputs[1][:, :10]
            return y

    torch.manual_seed(3)
    model = TwoArms().double()

    def train(communicator: Communicator) -> list[tuple[str, int]]:
        watched = Watched(communicator)
        bench = Bench.of(watched, model, bucket_bytes=1)
        x, y = bench.batches[0]
        for number in range(3):
            with replica_step(bench.replica, number, 1 / 2):
                F.cross_entropy(bench.model(x, communicator.rank), y).backward()
                bench.optimizer.step()
                bench.optimizer.zero_grad()
        return [entry for entry in watched.events if entry[0] == "start"]

    one, other = run_ranks(2, train)
    assert one == other


@pytest.mark.parametrize("when", ["in backward", "after backward", "after another forward"])
def test_nothing_is_installed_before_the_steps_end(model: nn.Module, when: str) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model, bucket_bytes=1)
        bench.step(0)
        bench.replica.settle()
        before = bench.weights()
        seen: list[list[Tensor]] = []
        if when == "in backward":
            last = bench.model[0].weight  # type: ignore[index]
            last.register_hook(lambda _: seen.append(bench.weights()))
        with replica_step(bench.replica, 1, 1 / 2):
            bench.backward(1)
            if when == "after another forward":
                bench.model(bench.batches[1][0])
            seen.append(bench.weights())
            for weights in seen:
                assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
            bench.optimizer.step()
        bench.replica.settle()
        assert not any(torch.equal(a, b) for a, b in zip(before, bench.weights(), strict=True))

    run_ranks(2, train)


def test_an_update_is_seen_by_autograd(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        bench.step(0)
        with torch._C.DisableTorchFunctionSubclass():
            versions = [p._version for p in bench.model.parameters()]
        bench.replica.settle()
        assert all(
            p._version > version
            for p, version in zip(bench.model.parameters(), versions, strict=True)
        )

    run_ranks(2, train)


class TiedSegments(nn.Module):
    """One layer in two segments of reentrant checkpointing: its gradient is accumulated twice."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inward = nn.Linear(192, 10)
        self.shared = nn.Linear(10, 10)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inward(x.flatten(1))
        for _ in range(2):
            y = checkpoint(self.shared, y, use_reentrant=self.use_reentrant)
        return y


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_that_one_backward_accumulates_twice(ranks: int) -> None:
    model = TiedSegments(use_reentrant=True).double()

    def train(communicator: Communicator) -> list[Tensor]:
        bench = Bench.of(communicator, model)
        for number in range(3):
            bench.step(number)
        bench.replica.settle()
        return [p.detach().clone() for p in bench.model.parameters()]

    found_by_ranks = run_ranks(ranks, train)
    for module in model.modules():
        vars(module)["use_reentrant"] = False
    expected = run_ranks(1, train)[0]
    for found in found_by_ranks:
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, expected, strict=True))


def loss_of(bench: Bench, number: int) -> Tensor:
    x, y = bench.batches[number]
    own = slice(bench.communicator.rank, None, bench.communicator.world_size)
    return F.cross_entropy(bench.model(x[own]), y[own])


def backward_twice(bench: Bench, number: int) -> None:
    loss = loss_of(bench, number)
    loss.backward(retain_graph=True)
    loss.backward()


def test_a_second_backward_in_each_step_doubles_the_gradients() -> None:
    model = Tied().double()

    def train(communicator: Communicator, *, twice: bool) -> list[Tensor]:
        bench = Bench.of(communicator, model)
        for number in range(3):
            with replica_step(bench.replica, number, 1 / communicator.world_size):
                if twice:
                    backward_twice(bench, number)
                else:
                    (2 * loss_of(bench, number)).backward()
                bench.optimizer.step()
            bench.optimizer.zero_grad()
        bench.replica.settle()
        return [p.detach().clone() for p in bench.model.parameters()]

    expected = run_ranks(3, partial(train, twice=False))
    for found, own in zip(run_ranks(3, partial(train, twice=True)), expected, strict=True):
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, own, strict=True))


def test_a_second_backward_is_refused_where_the_first_step_had_one() -> None:
    model = Tied().double()

    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        bench.step(0)
        with replica_step(bench.replica, 1, 1.0):
            backward_twice(bench, 1)

    with pytest.raises(ConfigError, match=r"inner\.weight was accumulated twice in step 1"):
        run_ranks(1, train)
