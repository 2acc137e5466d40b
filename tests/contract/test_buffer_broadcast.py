"""Buffers that a model computes from its rank's samples: rank 0's on all ranks after each step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from torch import Tensor, nn

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.method import Method
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket
from paceline.replica import buffer_broadcast
from paceline.replica.buffer_broadcast import BufferBroadcast
from paceline.replica.replica import Replica
from paceline.update.batch_norm import RunningStatistics
from paceline.update.updater import make_updater
from tests.harness.equivalence.given_builder import GivenBuilder
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.worlds import run_of

STEPS, WIDTH = 4, 6
States = list[dict[str, Tensor]]
Change = Callable[[nn.Module, int, int], None]


class Codebook(nn.Module):
    """Vector quantiser whose codebook follows its inputs, written as many such modules write it."""

    embed: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("embed", torch.randn(5, WIDTH))
        self.register_buffer("count", torch.zeros(5, dtype=torch.int32))
        self.register_buffer("started", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.embed).argmin(1)
        if self.training:
            self.started = torch.tensor(True)
            self.count.data.index_add_(0, nearest, torch.ones_like(nearest, dtype=torch.int32))
            self.embed.data[nearest] = 0.9 * self.embed[nearest] + 0.1 * x.detach()
        return x + (self.embed[nearest] - x).detach()


class Normaliser(nn.Module):
    """Normaliser of observations, which a script updates between two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (x - self.mean) * self.scale.float()
        return y


class Growing(nn.Module):
    """Memory of as many samples as the rank has had."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach()[:, 0]])
        return x


def quantised() -> nn.Module:
    """A model with observers, of which those of weights get their shapes in the first step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(
            quantization.QuantStub(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
        )
        model.qconfig = quantization.get_default_qat_qconfig("x86")  # type: ignore[assignment]
        quantization.prepare_qat(model.train(), inplace=True)
    return model


def with_head(module: nn.Module) -> nn.Module:
    return nn.Sequential(module, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))


def no_change(model: nn.Module, number: int, rank: int) -> None:
    """Leave the model as it is before each step."""


def train(
    c: Communicator,
    model: nn.Module,
    change: Change = no_change,
    *,
    own: bool = False,
    samples: Callable[[int], int] = lambda rank: 4,
) -> tuple[States, nn.Module]:
    """Train copies of a model on samples of each rank; return its states after each step."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def make(buckets: Sequence[Bucket]) -> Method:
        statistics = RunningStatistics(model)
        made = make_allreduce(buckets, c, make_updater(optimizer, buckets), statistics)
        return Method.by_gradients(made)

    run = run_of(c)
    buffers = None if own else BufferBroadcast(model, run)
    replica = Replica(model, optimizer, run, GivenBuilder(make, 200), buffers=buffers)
    random, states = torch.Generator().manual_seed(c.rank), []
    for number in range(STEPS):
        change(model, number, c.rank)
        with replica_step(replica, number, 1 / c.world_size):
            x = torch.randn(samples(c.rank), WIDTH, generator=random)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if number % 2:  # otherwise the next step installs what arrives
            states.append({name: value.clone() for name, value in model.state_dict().items()})
    replica.settle()
    states.append({name: value.clone() for name, value in model.state_dict().items()})
    replica.close()
    return states, model


def require_equal(of_ranks: list[States]) -> None:
    for others in of_ranks[1:]:
        for one, other in zip(of_ranks[0], others, strict=True):
            assert one.keys() == other.keys()
            for name in one:
                assert torch.equal(one[name], other[name]), name


MODELS: dict[str, Callable[[], nn.Module]] = {
    "observers": quantised,
    "codebook": lambda: with_head(Codebook()),
    "spectral norm": lambda: with_head(
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_have_rank_0s_buffers_after_each_step(name: str, ranks: int) -> None:
    torch.manual_seed(1)
    model = MODELS[name]()
    of_ranks = [states for states, _ in run_ranks(ranks, lambda c: train(c, model))]
    require_equal(of_ranks)
    before = model.state_dict()
    changed = [n for n, value in of_ranks[0][-1].items() if not torch.equal(value, before[n])]
    assert any(name in dict(model.named_buffers()) for name in changed)


def test_local_buffers_are_each_ranks_own_and_statistics_are_averaged_all_the_same() -> None:
    torch.manual_seed(1)
    model = with_head(Codebook())
    (one, _), (other, _) = run_ranks(2, lambda c: train(c, model, own=True))
    assert not torch.equal(one[-1]["0.embed"], other[-1]["0.embed"])
    assert torch.equal(one[-1]["1.running_mean"], other[-1]["1.running_mean"])


@pytest.mark.parametrize("through_data", [False, True])
def test_what_a_script_writes_between_two_steps_stays(through_data: bool) -> None:
    used: dict[int, list[float]] = {0: [], 1: []}

    def change(model: nn.Module, number: int, rank: int) -> None:
        scale = model.get_buffer("0.scale")
        (scale.data if through_data else scale).fill_(0.5**number)
        model.get_submodule("0").register_forward_pre_hook(
            lambda module, _: used[rank].append(float(module.scale))
        )

    require_equal([s for s, _ in run_ranks(2, lambda c: train(c, with_head(Normaliser()), change))])
    assert used[0] == used[1]
    assert sorted({*used[0]}) == [0.125, 0.25, 0.5, 1.0]


def test_what_only_this_rank_writes_between_two_steps_is_rank_0s_after_the_step() -> None:
    def change(model: nn.Module, number: int, rank: int) -> None:
        model.get_buffer("0.mean").add_(torch.randn(WIDTH) + rank)

    of_ranks = run_ranks(2, lambda c: train(c, with_head(Normaliser()), change))
    require_equal([states for states, _ in of_ranks])


def test_observers_that_are_enabled_in_mid_run_get_their_shapes_on_all_ranks() -> None:
    def change(model: nn.Module, number: int, rank: int) -> None:
        model.apply(quantization.enable_observer if number > 1 else quantization.disable_observer)

    model = quantised()
    of_ranks = run_ranks(2, lambda c: train(c, model, change))
    require_equal([states for states, _ in of_ranks])


def test_a_module_that_is_added_in_mid_run_is_broadcast_too() -> None:
    def change(model: nn.Module, number: int, rank: int) -> None:
        if number == 2:
            model.insert(0, Codebook())  # type: ignore[operator]

    of_ranks = run_ranks(2, lambda c: train(c, with_head(nn.Identity()), change))
    require_equal([states for states, _ in of_ranks])


def test_buffers_of_other_shapes_on_some_ranks_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        run_ranks(2, lambda c: train(c, with_head(Growing()), samples=lambda rank: 3 + rank))
    message = str(caught.value)
    assert "0.seen: (3,)" in message
    assert "0.seen: (4,)" in message
    assert 'buffers="local"' in message


def test_of_large_buffers_those_are_broadcast_that_the_first_step_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffer_broadcast, "_ALL", 100)
    monkeypatch.setattr(buffer_broadcast, "_SMALL", 30)
    sent: list[int] = []
    pack = buffer_broadcast._pack

    def counted(tensors: list[Tensor], layout: Any) -> Tensor:
        flat = pack(tensors, layout)
        sent.append(flat.numel())
        return flat

    monkeypatch.setattr(buffer_broadcast, "_pack", counted)
    torch.manual_seed(1)
    model = with_head(Codebook())
    model.register_buffer("table", torch.randn(1000))
    require_equal([states for states, _ in run_ranks(2, lambda c: train(c, model))])
    assert max(sent) < 4000


def test_bits_of_every_dtype_arrive() -> None:
    forms = [torch.bool, torch.int8, torch.bfloat16, torch.float8_e4m3fn, torch.complex128]
    values = [torch.randn(3).to(torch.float32).to(form) for form in forms]
    values += [torch.tensor(torch.nan), torch.zeros(0), torch.randn(2, 3, 4, 5)[:, ::2]]
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)

    def run(c: Communicator) -> nn.Module:
        module = nn.Module()
        for index, value in enumerate([*values, channels_last]):
            own = value if c.rank == 0 else torch.zeros_like(value)
            module.register_buffer(f"b{index}", own.clone())
        buffers = BufferBroadcast(module, run_of(c))
        buffers.begin_generation()
        buffers.send()
        buffers.install()
        return module

    one, other = run_ranks(2, run)
    for name, value in one.named_buffers():
        received = other.get_buffer(name)
        assert value.stride() == received.stride()
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (value, received)]
        assert torch.equal(*bits)
