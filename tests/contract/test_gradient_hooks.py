"""A script's hooks on gradients: what is exact with any number of ranks, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from tests.harness.equivalence.large_batch import (
    Training,
    World,
    convnet,
    largest_difference,
    usual_step,
)
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.put_synchronizers import KINDS
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step

Change = Callable[[Tensor], Tensor | None]


def hook(parameter: nn.Parameter, change: Change, how: str) -> Callable[[], None]:
    """Let a hook change a parameter's gradient; return what removes it."""
    if how == "tensor":
        return parameter.register_hook(change).remove

    def accumulated(parameter: Tensor) -> None:
        assert parameter.grad is not None
        changed = change(parameter.grad)
        if changed is not None and how == "in place":
            parameter.grad.copy_(changed)
        elif changed is not None:
            parameter.grad = changed

    return parameter.register_post_accumulate_grad_hook(accumulated).remove


def checkered(gradient: Tensor) -> Tensor:
    mask = torch.arange(gradient.numel(), dtype=gradient.dtype).remainder(2)
    return gradient * mask.view_as(gradient)


HOWS = ["tensor", "in place", "replaced"]
EXACT: dict[str, Change] = {
    "mask": checkered,
    "factor": lambda gradient: -0.3 * gradient,
    "copy": lambda gradient: gradient.clone(),
    "look": lambda gradient: None,
    "zero": torch.zeros_like,
}
INEXACT: dict[str, Change] = {
    "clamp": lambda gradient: gradient.clamp(-1e-3, 1e-3),
    "sign": torch.sign,
    "norm": lambda gradient: gradient / gradient.norm(),
    "noise": lambda gradient: gradient + 1e-3 * torch.randn_like(gradient),
    "offset": lambda gradient: gradient + 1e-3,
}


class Hooked:
    """A step whose first call registers hooks, or each call for its backward alone."""

    def __init__(self, change: Change, how: str, *, each: bool) -> None:
        self._change, self._how, self._each = change, how, each
        self._begun = False

    def __call__(
        self, world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> None:
        with ExitStack() as hooks:
            for parameter in model.parameters() if self._each or not self._begun else ():
                remove = hook(parameter, self._change, self._how)
                if self._each:
                    hooks.callback(remove)
            self._begun = True
            usual_step(world, model, optimizer, x, y)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("change", EXACT)
def test_a_multiple_of_the_gradient_is_exact(change: str, how: str, world_size: int) -> None:
    torch.manual_seed(1)
    training = Training.of(
        convnet(), steps=4, make_step=lambda: Hooked(EXACT[change], how, each=False)
    )
    for state in training.on_threads(world_size, 2_000):
        assert largest_difference(state, training.alone()) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOWS)
def test_hooks_for_one_backward_are_exact(how: str, kind: str) -> None:
    torch.manual_seed(1)
    training = Training.of(convnet(), steps=4, make_step=lambda: Hooked(checkered, how, each=True))
    for state in training.on_threads(2, 2_000, **KINDS[kind]()):
        assert largest_difference(state, training.alone()) < 1e-10


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("change", ["clamp", "sign", "norm"])
def test_any_change_is_exact_with_one_rank(change: str, how: str) -> None:
    torch.manual_seed(1)
    training = Training.of(
        convnet(), steps=4, make_step=lambda: Hooked(INEXACT[change], how, each=False)
    )
    (state,) = training.on_threads(1, 2_000)
    assert largest_difference(state, training.alone()) < 1e-10


def refused(
    change: str, how: str, kind: str = "allreduce", when: str = "first", name: str = "3.weight"
) -> list[str]:
    """Return what each of two ranks gets whose hook changes the gradient of one parameter."""
    torch.manual_seed(1)
    model, options = convnet(), KINDS[kind]()

    def on_rank(communicator: Communicator) -> str:
        bench = Bench.of(communicator, model, **options)
        parameter = dict(bench.model.named_parameters())[name]
        number = 0
        if when != "first":  # backward sends gradients by then
            bench.step(0)
            bench.step(1)
            number = 2
        hook(parameter, INEXACT[change], how)
        changed: ConfigError | None = None
        try:
            bench.step(number)
            bench.step(number + 1)  # a norm is a factor that looks constant in one step
        except ConfigError as error:
            changed = error
        return str(changed)

    return run_ranks(2, on_rank)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("change", INEXACT)
def test_another_change_is_refused(change: str, how: str) -> None:
    for text in refused(change, how):
        assert text.startswith("a hook changes the gradient of 3.weight in backward")
        assert "change gradients after backward()" in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["0.weight", "6.bias"])
def test_a_change_is_refused_in_any_step(how: str, kind: str, name: str) -> None:
    for text in refused("clamp", how, kind, when="third", name=name):
        assert text.startswith(f"a hook changes the gradient of {name} in backward")


def test_hooks_outside_of_steps_may_change_gradients() -> None:
    torch.manual_seed(1)
    model = convnet()

    def on_rank(communicator: Communicator) -> list[Tensor]:
        bench = Bench.of(communicator, model)
        bench.step(0)
        parameter = next(bench.model.parameters())
        remove = hook(parameter, INEXACT["sign"], "tensor")
        bench.backward(1)  # a saliency map, say
        bench.optimizer.zero_grad()
        remove()
        bench.step(2)
        return bench.weights()

    assert all(map(torch.equal, *run_ranks(2, on_rank)))


def test_gradients_that_accumulate_are_compared_too() -> None:
    torch.manual_seed(1)
    model = convnet()

    def on_rank(communicator: Communicator) -> str:
        bench = Bench.of(communicator, model)
        hook(next(bench.model.parameters()), INEXACT["clamp"], "tensor")
        with (
            pytest.raises(ConfigError) as caught,
            replica_step(bench.replica, 0, 0.5),
            bench.replica.no_sync(),
        ):
            bench.backward(0)
        return str(caught.value)

    assert all("a hook changes the gradient of 0.weight" in text for text in run_ranks(2, on_rank))


def test_no_comparison_outlives_the_replica() -> None:
    torch.manual_seed(1)
    model = convnet()
    parameter = next(model.parameters())

    def on_rank(communicator: Communicator) -> tuple[int, int]:
        bench = Bench.of(communicator, model)
        parameter = next(bench.model.parameters())
        hook(parameter, EXACT["mask"], "tensor")
        hook(parameter, EXACT["mask"], "in place")
        bench.step(0)
        bench.replica.close()
        assert parameter._backward_hooks is not None
        assert parameter._post_accumulate_grad_hooks is not None  # type: ignore[attr-defined]
        return len(parameter._backward_hooks), len(parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]

    assert run_ranks(2, on_rank) == [(1, 1), (1, 1)]
    assert not parameter._backward_hooks


# Differentiation of gradients.


class Penalised:
    """A step with a penalty on gradients with respect to something."""

    def __init__(self, respect: str) -> None:
        self._respect = respect

    def __call__(
        self, world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> None:
        x = x.clone().requires_grad_()
        losses = F.cross_entropy(model(x), y, reduction="none")
        if self._respect == "inputs":
            (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
            (losses.mean() + slope.square().flatten(1).sum(1).mean()).backward()
        elif self._respect == "nothing":  # a graph that nothing uses
            losses.mean().backward(create_graph=True)
        elif self._respect == "graph":
            losses.mean().backward(create_graph=True)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            torch.stack([g.square().sum() for g in gradients]).sum().mul(0.01).backward()
        else:
            parameters = list(model.parameters())
            asked = parameters
            if self._respect == "edges":
                asked = [torch.autograd.graph.get_gradient_edge(p) for p in parameters]  # type: ignore[misc]
            gradients = list(torch.autograd.grad(losses.mean(), asked, create_graph=True))
            penalty = torch.stack([g.square().sum() for g in gradients]).sum()
            (losses.mean() + 0.01 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("respect", ["inputs", "nothing"])
def test_these_second_derivatives_are_exact(respect: str, kind: str) -> None:
    torch.manual_seed(1)
    training = Training.of(convnet(), steps=4, make_step=lambda: Penalised(respect))
    for state in training.on_threads(2, 2_000, **KINDS[kind]()):
        assert largest_difference(state, training.alone()) < 1e-10


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("respect", ["parameters", "edges", "graph", "inputs", "nothing"])
def test_all_are_exact_with_one_rank(respect: str) -> None:
    torch.manual_seed(1)
    training = Training.of(convnet(), steps=4, make_step=lambda: Penalised(respect))
    (state,) = training.on_threads(1, 2_000)
    assert largest_difference(state, training.alone()) < 1e-10


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("respect", "sentence"),
    [
        ("parameters", "was called for the gradient of 0.weight in step 0"),
        ("edges", "was called for the gradient of 0.weight in step 0"),
        ("graph", "is used after a backward with create_graph=True"),
    ],
)
def test_a_loss_of_this_ranks_gradients_is_refused(respect: str, sentence: str, kind: str) -> None:
    torch.manual_seed(1)
    model, options = convnet(), KINDS[kind]()

    def on_rank(communicator: Communicator) -> str:
        bench = Bench.of(communicator, model, **options)
        step = Penalised(respect)
        x, y = bench.batches[0]
        with pytest.raises(ConfigError) as caught, replica_step(bench.replica, 0, 0.5):
            step(bench.replica, bench.model, bench.optimizer, x, y)
        return str(caught.value)

    for text in run_ranks(2, on_rank):
        assert sentence in text


def test_gradients_of_copies_may_be_differentiated() -> None:
    """As of each task's own weights (MAML)."""
    torch.manual_seed(1)
    model = nn.Linear(3, 1).double()
    tasks = torch.randn(8, 5, 3, dtype=torch.float64)

    def adapted_loss(model: nn.Linear, task: Tensor) -> Tensor:
        weight = model.weight.clone()
        (slope,) = torch.autograd.grad((task @ weight.T).square().mean(), weight, create_graph=True)
        return (task @ (weight - 0.1 * slope).T - 1).square().mean()

    class Adapted:
        def __call__(
            self, world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
        ) -> None:
            assert isinstance(model, nn.Linear)
            model(x[0])  # its bias has no gradient otherwise
            torch.stack([adapted_loss(model, task) for task in x]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    training = Training(
        model,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        [(tasks, torch.zeros(8))] * 4,
        make_step=Adapted,
    )
    for state in training.on_threads(2, 2_000):
        assert largest_difference(state, training.alone()) < 1e-10


class Parabola(nn.Module):
    """w x^2 + b, whose slope doesn't depend on b: a penalty on it leaves b without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(1, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x.square() + self.b * x / x


class PenaltyAlone:
    def __call__(
        self, world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> None:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_a_penalty_without_another_loss_is_exact(kind: str) -> None:
    torch.manual_seed(1)
    x = torch.rand(6, dtype=torch.float64) + 1
    training = Training(
        Parabola(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        [(x, x)] * 4,
        make_step=PenaltyAlone,
    )
    for state in training.on_threads(2, 2_000, **KINDS[kind]()):
        assert largest_difference(state, training.alone()) < 1e-10
