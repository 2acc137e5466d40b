"""A script's use of parameters after a step finds what it finds in plain torch."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline.algorithms.sharded import make_sharded
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError, PeerLost
from tests.harness.equivalence.case_models import normalised
from tests.harness.equivalence.large_batch import Training, convnet
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.put_synchronizers import KINDS, notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step


class Average:
    """Exponential moving average by hand, as in many scripts."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> list[Tensor]:
        for name, p in model.named_parameters():
            self.shadow[name].mul_(0.9).add_(p, alpha=0.1)
        return list(self.shadow.values())


def swa(model: nn.Module) -> Callable[[nn.Module], list[Tensor]]:
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def update(model: nn.Module) -> list[Tensor]:
        averaged.update_parameters(model)
        return list(averaged.parameters())

    return update


def by_data(model: nn.Module) -> list[Tensor]:
    return [p.data.clone() for p in model.parameters()]


def in_inference_mode(model: nn.Module) -> list[Tensor]:
    with torch.inference_mode():
        norm = torch.linalg.vector_norm(next(model.parameters()))
    return [norm.clone()]


def in_another_thread(model: nn.Module) -> list[Tensor]:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(by_data(model)))
    thread.start()
    thread.join()
    return found


def by_jacobian(model: nn.Module) -> list[Tensor]:
    """Run the model itself inside of a transform."""
    x = Training.of(model).batches[0][0]

    def total(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, x).pow(2).sum()

    return list(torch.func.jacrev(total)(dict(model.named_parameters())).values())


def penalty(model: nn.Module) -> list[Tensor]:
    return [torch.stack([p.pow(2).sum() for p in model.parameters()]).sum().detach()]


def first_of(model: nn.Module) -> Any:
    return next(model.parameters())


# Each makes what is called after each step, which returns what it found.
USES: dict[str, Callable[[nn.Module], Callable[[nn.Module], list[Tensor]]]] = {
    "average by hand": lambda m: Average(m).update,
    "AveragedModel": swa,
    "data": lambda _: by_data,
    "deepcopy": lambda _: lambda m: list(copy.deepcopy(m).parameters()),
    "deepcopy of a parameter": lambda _: lambda m: [copy.deepcopy(first_of(m))],
    "pickle": lambda _: lambda m: list(pickle.loads(pickle.dumps(m)).parameters()),
    "state_dict": lambda _: lambda m: list(copy.deepcopy(m.state_dict()).values()),
    "norm": lambda _: lambda m: [torch.linalg.vector_norm(first_of(m).detach())],
    "foreach": lambda _: lambda m: list(torch._foreach_mul(list(m.parameters()), 2)),
    "stack": lambda _: lambda m: [torch.stack([torch.ones(8).double(), m[0].bias])],  # type: ignore[index, union-attr]
    "numpy": lambda _: lambda m: [torch.from_numpy(first_of(m).detach().numpy().copy())],
    "tolist": lambda _: lambda m: [torch.tensor(first_of(m).tolist()).double()],
    "iteration": lambda _: lambda m: [row.detach().clone() for row in first_of(m)],
    "repr": lambda _: lambda m: [torch.tensor(list(repr(first_of(m)).encode()))],
    "penalty": lambda _: penalty,
    "functional": lambda _: lambda m: [nn.functional.relu(first_of(m)).detach()],
    "vmap": lambda _: lambda m: [torch.vmap(lambda v: v * m[0].bias)(torch.ones(2, 8).double())],  # type: ignore[index, union-attr, operator]
    "jacobian": lambda _: by_jacobian,
    "inference mode": lambda _: in_inference_mode,
    "another thread": lambda _: in_another_thread,
}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return convnet()


def in_plain_torch(model: nn.Module, make: Callable[..., Any], steps: int = 3) -> list[Tensor]:
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    use, found = make(own), []
    for x, y in Training.of(own).batches[:steps]:
        nn.functional.cross_entropy(own(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [one.clone() for one in use(own)]
    return found


@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", USES)
def test_a_use_finds_the_updated_parameters(
    model: nn.Module, name: str, kind: str, ranks: list[int]
) -> None:
    make, options = USES[name], KINDS[kind]()

    def train(communicator: Communicator) -> list[Tensor]:
        bench = Bench.of(communicator, model, **options)
        use, found = make(bench.model), []
        for number in range(3):
            bench.step(number)
            if communicator.rank in ranks:
                found += [one.clone() for one in use(bench.model)]
        bench.replica.settle()
        bench.replica.drain()
        bench.replica.close()
        return found

    expected = in_plain_torch(model, make)
    found = run_ranks(2, train)
    for rank in ranks:
        assert len(found[rank]) == len(expected)
        for ours, theirs in zip(found[rank], expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_use_after_a_module_was_called_by_itself_finds_the_updated_parameters(
    model: nn.Module, kind: str
) -> None:
    """The module waits for its own update; the use, for that of another module's parameter."""
    options = KINDS[kind]()

    def train(c: Communicator) -> None:
        bench = Bench.of(c, model, **options)
        bench.step(0)
        for number in (1, 2):
            before = bench.weights()
            bench.step(number)
            with torch.no_grad():
                bench.model[0](bench.batches[0][0])  # type: ignore[index]
            used = by_data(bench.model)
            bench.replica.settle()
            assert all(map(torch.equal, used, bench.weights()))
            assert not any(map(torch.equal, used, before))
        bench.replica.drain()
        bench.replica.close()

    run_ranks(2, train)


def test_a_forward_of_the_whole_model_waits_layer_by_layer(model: nn.Module) -> None:
    """Its first layer runs before the last one's update."""

    def train(c: Communicator) -> list[bool]:
        bench, updated = Bench.of(c, model), []
        bench.step(0)
        bench.step(1)
        before = bench.weights()
        bench.model[0].register_forward_hook(  # type: ignore[index]
            lambda *_: updated.extend(
                not torch.equal(a, b) for a, b in zip(bench.weights(), before, strict=True)
            )
        )
        bench.step(2)
        return updated

    runs = [run_ranks(2, train)[0] for _ in range(5)]
    assert all(first for first, *_ in runs)
    # A layer's wait installs what has arrived, which may be everything in one of the runs.
    assert not all(all(others) for _, *others in runs)


def test_a_use_inside_a_transform_installs_running_statistics_outside_of_it() -> None:
    torch.manual_seed(1)
    model = normalised()

    def train(communicator: Communicator) -> tuple[Tensor, Tensor]:
        bench = Bench.of(communicator, model)
        bench.step(0)
        weight = first_of(bench.model)

        def total(v: Tensor) -> Tensor:
            return (v * weight).sum()

        found = torch.func.grad(total)(torch.ones(weight.shape).double())
        return found, weight.detach()

    for found, weight in run_ranks(2, train):
        assert torch.equal(found, weight)


def test_copies_have_the_parameters_own_class(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        for after in ("step", "backward"):
            with replica_step(bench.replica, 0, 0.5):
                bench.backward(0)
                if after == "step":
                    bench.optimizer.step()
                own = list(bench.model.parameters())
                assert any(type(p) is not nn.Parameter for p in own)
                assert all(isinstance(p, nn.Parameter) for p in own)
                copies = [*copy.deepcopy(bench.model).parameters(), *map(copy.deepcopy, own)]
                copies += pickle.loads(pickle.dumps(bench.model)).parameters()
                assert {type(p) for p in copies} == {nn.Parameter}
        bench.replica.close()
        assert {type(p) for p in bench.model.parameters()} == {nn.Parameter}

    run_ranks(2, train)


class Named(nn.Parameter):
    """A parameter class of the script's own."""


def test_a_parameter_class_of_the_scripts_own_stays(model: nn.Module) -> None:
    model[2].weight = Named(model[2].weight.detach())  # type: ignore[index]

    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        bench.step(0)
        weight = bench.model[2].weight  # type: ignore[index]
        assert isinstance(weight, Named)
        assert type(copy.deepcopy(weight)) is Named
        bench.backward(0)
        assert type(weight) is Named

    run_ranks(1, train)


def test_what_an_update_does_not_change_is_used_without_a_wait(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        bench.step(0)
        before = bench.weights()
        for p in bench.model.parameters():
            assert p.requires_grad
            assert p.is_leaf
            assert p.numel() >= len(p)
            assert p.grad is None
            assert p in {p}
            p.grad = None
            p.requires_grad_(True)
        bench.optimizer.zero_grad(set_to_none=True)
        bench.model.zero_grad()
        assert all(map(torch.equal, before, bench.weights()))

    run_ranks(2, train)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_after_the_step_is_the_global_mean_or_refused(
    model: nn.Module, kind: str
) -> None:
    options = KINDS[kind]()

    def train(communicator: Communicator) -> list[Tensor]:
        bench = Bench.of(communicator, model, **options)
        with replica_step(bench.replica, 0, 0.5):
            bench.backward(0)
            bench.optimizer.step()
        try:
            if kind == "sharded":
                with pytest.raises(ConfigError, match=r"0\.weight was used after optimizer\.step"):
                    _ = first_of(bench.model).grad
                return []
            return [p.grad.clone() for p in bench.model.parameters() if p.grad is not None]
        finally:
            bench.replica.settle()
            bench.replica.drain()
            bench.replica.close()

    own = copy.deepcopy(model)
    x, y = Training.of(own).batches[0]
    nn.functional.cross_entropy(own(x), y).backward()
    for gradients in run_ranks(2, train):
        for ours, p in zip(gradients, own.parameters(), strict=kind != "sharded"):
            assert p.grad is not None
            torch.testing.assert_close(ours, p.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["allreduce", "notified"])
def test_one_rank_alone_may_use_a_gradient(model: nn.Module, kind: str) -> None:
    options = KINDS[kind]()

    def train(communicator: Communicator) -> list[nn.Parameter]:
        bench = Bench.of(communicator, model, **options)
        for number in range(3):
            with replica_step(bench.replica, number, 0.5):
                bench.backward(number)
                if communicator.rank == number % 2:
                    assert first_of(bench.model).grad.norm() > 0
                bench.optimizer.step()
                bench.optimizer.zero_grad()
        bench.replica.settle()
        bench.replica.drain()
        bench.replica.close()
        return list(bench.model.parameters())

    one, other = run_ranks(2, train)
    expected = in_plain_torch(model, lambda m: lambda m: list(m.parameters()))[-len(one) :]
    for ours, theirs, alone in zip(one, other, expected, strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours.detach(), alone.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("machines", [(1, 1), (2,), (2, 2), (1, 1, 1)], ids=str)
def test_where_ranks_hold_shards_all_use_gradients_or_none(
    model: nn.Module, machines: tuple[int, ...]
) -> None:
    kind = notified(False, machines, "fp32", make_sharded)

    def train(communicator: Communicator) -> str:
        bench = Bench.of(communicator, model, kind=kind)
        bench.step(0)

        def step() -> None:
            with replica_step(bench.replica, 1, 1 / sum(machines)):
                bench.backward(1)
                if communicator.rank == 1:
                    assert first_of(bench.model).grad.norm() > 0
                bench.optimizer.step()
                bench.optimizer.zero_grad()
            bench.replica.settle()

        with pytest.raises((ConfigError, PeerLost)) as caught:
            step()
        bench.replica.close()
        return str(caught.value)

    sentences = run_ranks(sum(machines), train)
    expected = "gradients were used on rank 1 in bucket "
    assert any(sentence.startswith(expected) for sentence in sentences), sentences
    for sentence in sentences:
        assert sentence.startswith(expected) or "lost rank" in sentence, sentences
