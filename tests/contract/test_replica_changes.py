"""What is trained changes between steps: noticed, bound anew, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from paceline.algorithms.allreduce import make_allreduce
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from paceline.replica.replica import Replica
from paceline.update.batch_norm import BatchShare, convert_sync_batchnorm
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
from tests.harness.processes.worlds import run_of
from tests.harness.twins.communicator import ThreadCommunicator, ThreadGroup


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return convnet()


class Counting(ThreadCommunicator):
    """Counts the values that are summed and broadcast."""

    summed = 0
    broadcasts = 0

    def all_reduce(self, tensor: Tensor) -> Any:
        self.summed += tensor.numel()
        return super().all_reduce(tensor)

    def broadcast(self, tensor: Tensor) -> Any:
        self.broadcasts += 1
        return super().broadcast(tensor)


def test_what_is_frozen_travels_no_more(model: nn.Module) -> None:
    communicator = Counting(ThreadGroup(1), 0)
    communicator.world_size = 2  # a world of one exchanges nothing
    bench = Bench.of(communicator, model)
    for number in range(2):
        communicator.summed = 0
        bench.step(number)
        if number == 0:
            assert communicator.summed == sum(p.numel() + 1 for p in model.parameters())
            bench.model[6].requires_grad_(False)  # type: ignore[index]
    trained = [p for p in bench.model.parameters() if p.requires_grad]
    assert communicator.summed == sum(p.numel() + 1 for p in trained)


def test_nothing_is_bound_anew_where_nothing_changed(model: nn.Module) -> None:
    bench = Bench.of(Counting(ThreadGroup(1), 0), model)
    buckets = bench.replica._binding.buckets
    for number in range(3):
        bench.step(number)
        bench.optimizer.load_state_dict(copy.deepcopy(bench.optimizer.state_dict()))
        bench.model.eval()
        bench.model.train()
        bench.model.load_state_dict(copy.deepcopy(bench.model.state_dict()))
    assert bench.replica._binding.buckets is buckets


def test_only_what_is_new_is_broadcast(model: nn.Module) -> None:
    group = ThreadGroup(2)

    def train(own: Communicator) -> list[int]:
        communicator = Counting(group, own.rank)
        bench = Bench.of(communicator, model)
        counts = [communicator.broadcasts]
        bench.step(0)
        bench.model[0].requires_grad_(False)  # type: ignore[index]
        bench.step(1)
        counts.append(communicator.broadcasts)
        extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
        bench.optimizer.add_param_group({"params": [extra]})
        bench.step(2)
        return [*counts, communicator.broadcasts]

    (before, frozen, extended), other = run_ranks(2, train)
    assert other == [before, frozen, extended]
    assert (frozen, extended) == (before, before + 1)


def test_buffers_that_the_model_gets_later_are_rank_0s(model: nn.Module) -> None:
    def train(communicator: Communicator) -> Tensor:
        bench = Bench.of(communicator, model)
        bench.step(0)
        noise = torch.full((3,), float(communicator.rank + 1))
        bench.model[4].register_buffer("noise", noise)  # type: ignore[index]
        norm = nn.BatchNorm1d(10, affine=False).double()
        norm.running_mean += communicator.rank
        bench.model.append(norm)  # type: ignore[operator]
        bench.step(1)
        bench.replica.settle()
        return torch.cat([b.double().flatten() for b in bench.model.buffers()])

    first, second = run_ranks(2, train)
    assert torch.equal(first[:3], torch.ones(3).double())
    assert torch.equal(first, second)


def frozen_layer(value: float) -> nn.Module:
    layer = nn.Linear(10, 10).double().requires_grad_(False)
    nn.init.constant_(layer.weight, value)
    return layer


def frozen_statistics(value: float) -> nn.Module:
    layer = nn.BatchNorm1d(10, affine=False).double().eval()
    nn.init.constant_(layer.running_mean, value)  # type: ignore[arg-type]
    return layer


@pytest.mark.parametrize("make", [frozen_layer, frozen_statistics])
def test_a_replaced_layer_gets_rank_0s_values(
    model: nn.Sequential, make: Callable[[float], nn.Module]
) -> None:
    """Its parameters or buffers have the same names as those before."""

    def train(communicator: Communicator) -> tuple[float, int]:
        bench = Bench.of(communicator, nn.Sequential(*model, make(1.0)))
        other = make(2.0 + communicator.rank)
        bench.step(0)
        bench.model[7] = other  # type: ignore[operator]
        bench.step(1)
        first, *_ = bench.model[7].state_dict().values()  # type: ignore[index]
        return first.max().item(), bench.replica.bindings

    assert run_ranks(2, train) == [(2.0, 2)] * 2


def test_a_replaced_parameter_gets_rank_0s_values(model: nn.Sequential) -> None:
    def train(communicator: Communicator) -> float:
        bench = Bench.of(communicator, nn.Sequential(*model, frozen_layer(1.0)))
        bench.step(0)
        own = torch.full((10, 10), 2.0 + communicator.rank).double()
        weight = nn.Parameter(own, requires_grad=False)
        bench.model[7].weight = weight  # type: ignore[index]
        bench.step(1)
        return weight.max().item()

    assert run_ranks(2, train) == [2.0, 2.0]


def test_a_layer_that_is_wrapped_has_its_new_names_in_the_next_step(model: nn.Sequential) -> None:
    bench = Bench.of(ThreadGroup(1).communicator(0), model)
    bench.step(0)
    bench.model[0] = nn.Sequential(bench.model[0])  # type: ignore[operator,index]
    bench.step(1)
    assert "0.0.weight" in bench.replica.names.values()


@pytest.mark.parametrize("count", [1, 50])
def test_ranks_that_add_other_tensors_are_refused(model: nn.Sequential, count: int) -> None:
    """Also where only the last of many names differs."""

    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        bench.step(0)
        for number in range(count):
            last = number == count - 1 and communicator.rank
            bench.model[4].register_buffer(f"{'z' if last else 'b'}{number:02}", torch.ones(2))  # type: ignore[index]
        bench.step(1)

    with pytest.raises(ConfigError, match=r"got the new 4\.\w00.* on rank \d: register the same"):
        run_ranks(2, train)


def test_modules_elsewhere_bind_nothing_anew(model: nn.Module) -> None:
    """One rank alone may make another model, or replace a buffer's value in its own."""

    def train(communicator: Communicator) -> int:
        bench = Bench.of(communicator, Counted(model))
        bench.step(0)
        if communicator.rank == 1:
            nn.Sequential(nn.BatchNorm1d(4)).append(nn.Linear(2, 2))
        bench.step(1)
        return bench.replica.bindings

    assert run_ranks(2, train) == [1, 1]


class Counted(nn.Module):
    """A model that replaces its buffer in each forward."""

    seen: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = copy.deepcopy(inner)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        y: Tensor = self.inner(x)
        return y


def test_parameters_that_no_optimizer_has_are_refused_in_the_step_after(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        bench.step(0)
        nn.utils.parametrizations.weight_norm(bench.model[0])  # type: ignore[index]
        bench.step(1)

    sentence = r"0\.parametrizations\.weight\.original0 has a gradient, but no optimizer"
    with pytest.raises(ConfigError, match=sentence):
        run_ranks(2, train)


def test_unfreezing_within_a_step_is_refused(model: nn.Module) -> None:
    model[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]

    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        with replica_step(bench.replica, 0, 1.0):
            bench.model[0].bias.requires_grad_(True)  # type: ignore[index, union-attr]
            bench.backward(0)
            bench.optimizer.step()

    with pytest.raises(ConfigError, match=r"0\.bias has a gradient that is not .* between steps"):
        run_ranks(1, train)


def test_a_gradient_left_on_a_frozen_parameter_is_refused(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        bench.step(0, set_to_none=False)
        bench.model[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
        bench.step(1)

    with pytest.raises(ConfigError, match=r"0\.bias has a gradient .*\.grad = None on frozen ones"):
        run_ranks(1, train)


def test_accumulating_goes_on_where_what_is_trained_changes(model: nn.Module) -> None:
    def train(communicator: Communicator) -> dict[str, Tensor]:
        bench = Bench.of(communicator, model)
        bench.step(0)
        bench.model[0].requires_grad_(False)  # type: ignore[index]
        with bench.replica.no_sync(), replica_step(bench.replica, 1, 1 / communicator.world_size):
            bench.backward(1)
            bench.backward(2)
            bench.optimizer.step()
            bench.optimizer.zero_grad()
        return bench.model.state_dict()

    assert largest_difference(run_ranks(2, train)[0], run_ranks(1, train)[0]) < 1e-10


def test_another_dtype_is_another_exchange(model: nn.Module) -> None:
    def train(communicator: Communicator) -> dict[str, Tensor]:
        bench = Bench.of(communicator, model)
        whole = bench.batches
        for number, dtype in enumerate([torch.float64, torch.float32, torch.float64]):
            bench.replica.settle()
            bench.model.to(dtype)
            bench.batches = [(x.to(dtype), y) for x, y in whole]
            bench.step(number)
        return bench.model.state_dict()

    assert largest_difference(run_ranks(2, train)[0], run_ranks(1, train)[0]) < 1e-5


def test_another_plan_needs_no_second_lesson(model: nn.Module) -> None:
    communicator, optimizer = ThreadGroup(1).communicator(0), sgd(model)
    replica = replicate(model, optimizer, communicator, 2_000, later=(None, (make_allreduce, 1)))
    watched = []
    model[6].register_forward_hook(  # type: ignore[index]
        lambda *_: watched.append(_get_current_dispatch_mode() is not None)
    )
    for number, (x, y) in enumerate(Training.of(model, steps=3).batches):
        with replica_step(replica, number, 1.0):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watched == [True, False, False]
    assert len(replica._binding.buckets) == len(list(model.parameters()))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_parameter_without_a_shape_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(ConfigError, match=r"1\.weight is uninitialised .* run one batch"):
        Bench.of(ThreadGroup(1).communicator(0), model)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("LBFGS", "LBFGS evaluates the loss several times"),
        ("SparseAdam", "SparseAdam takes sparse gradients only.* or Adam and sparse=False"),
    ],
)
def test_an_optimizer_that_cant_be_exchanged_is_refused(
    model: nn.Module, name: str, said: str
) -> None:
    optimizer = getattr(torch.optim, name)(list(model.parameters()))
    with pytest.raises(ConfigError, match=said):
        replicate(model, optimizer, ThreadGroup(1).communicator(0), 2_000)


def test_a_copy_made_before_the_first_step_learns_nothing_after_it(model: nn.Module) -> None:
    bench = Bench.of(ThreadGroup(1).communicator(0), model)
    average = copy.deepcopy(bench.model)
    x, _ = bench.batches[0]
    modes: list[object] = []
    average[6].register_forward_hook(lambda *_: modes.append(_get_current_dispatch_mode()))  # type: ignore[index]
    average(x)  # during the lesson: seen, as the model's own calls are
    bench.step(0)
    average(x)
    assert modes[-1] is None


def test_a_copy_of_a_model_with_sync_bn_evaluates_by_itself() -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    layers = Counting(ThreadGroup(1), 0)
    share = BatchShare()
    synced = convert_sync_batchnorm(model, run_of(layers), share)
    replica = replicate(synced, sgd(synced), ThreadGroup(1).communicator(0), 2_000, share=share)
    x = torch.randn(5, 4, dtype=torch.float64)
    with replica_step(replica, 0, 1.0):
        synced(x).sum().backward()
    average = copy.deepcopy(synced).eval()
    before = layers.summed
    assert torch.equal(average(x), synced.eval()(x))
    assert layers.summed == before


def test_closing_gives_back_the_step_that_a_scheduler_wrapped(model: nn.Module) -> None:
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    wrapped = vars(optimizer)["step"]
    replica = replicate(model, optimizer, ThreadGroup(1).communicator(0), 2_000)
    assert vars(optimizer)["step"] is not wrapped
    replica.close()
    assert vars(optimizer)["step"] is wrapped
    optimizer.step()
    schedule.step()


class ReadsOutside(nn.Module):
    """A layer, and a bias that only the loop reads."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(10))
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


def reducing(replica: Replica, number: int, loss: Callable[[], Tensor]) -> None:
    loss().backward()
    if number == 0:
        replica.reduce()


def accumulating(replica: Replica, number: int, loss: Callable[[], Tensor]) -> None:
    with replica.no_sync():
        (loss() * 0.25).backward()
    (loss() * 0.75).backward()


def accumulating_all(replica: Replica, number: int, loss: Callable[[], Tensor]) -> None:
    with replica.no_sync():
        loss().backward()


def left_out(replica: Replica, number: int, loss: Callable[[], Tensor]) -> None:
    loss().backward()


@pytest.mark.parametrize("backward", [reducing, accumulating, accumulating_all, left_out])
@pytest.mark.parametrize("changes", [False, True])
def test_what_is_read_outside_is_never_stale_whatever_the_first_step_does(
    backward: Callable[..., None], changes: bool
) -> None:
    """The lesson of the first step; and that after a change, which begins like a first one."""
    torch.manual_seed(9)
    model = ReadsOutside().double()
    skipped = 0 if backward is left_out else None

    def train(communicator: Communicator) -> dict[str, Tensor]:
        bench = Bench.of(communicator, model, bucket_bytes=1)
        for number, (x, y) in enumerate(bench.batches):
            local = slice(communicator.rank, None, communicator.world_size)

            def loss(x: Tensor = x[local], y: Tensor = y[local]) -> Tensor:
                own: Any = bench.model
                return F.cross_entropy(own.bias + own.body(x), y)  # the model itself isn't called

            bench.model.body[1].bias.requires_grad_(not changes or number < 4)  # type: ignore[index, union-attr]
            with replica_step(bench.replica, number, len(x[local]) / len(x)):
                backward(bench.replica, number, loss)
                if number != skipped:
                    bench.optimizer.step()
                bench.optimizer.zero_grad()
        return bench.model.state_dict()

    alone: Any = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for number, (x, y) in enumerate(Training.of(model).batches):
        alone.body[1].bias.requires_grad_(not changes or number < 4)
        F.cross_entropy(alone.bias + alone.body(x), y).backward()
        if number != skipped:
            optimizer.step()
        optimizer.zero_grad()
    assert largest_difference(run_ranks(2, train)[0], alone.state_dict()) < 1e-10
