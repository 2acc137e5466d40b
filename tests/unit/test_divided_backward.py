"""Divided backward: the gradients of a whole one, in two passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.divided_backward import DividedBackward

X = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Shared(nn.Module):
    """Uses a layer twice, a parameter of its own, and its input once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.places = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x + self.places).tanh()
        return self.layer(y * self.places) + x


class Apart(nn.Module):
    """Returns a second value that doesn't depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x).relu(), self.layer.weight.exp()


MODELS: dict[str, Any] = {
    "layers": lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2)),
    "transformer": lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True),
    "shared": Shared,
    "apart": Apart,
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_two_passes_have_the_gradients_of_one(name: str, whole: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    parameters = [*model.parameters()]
    x = X.clone().requires_grad_()
    ends = _ends(model(x))
    gradients = [torch.randn_like(end) for end in ends]
    torch.autograd.backward(ends, gradients)
    expected = [p.grad for p in parameters]
    model.zero_grad()

    accumulated: list[Tensor] = []
    for p in parameters:
        p.register_post_accumulate_grad_hook(accumulated.append)
    again = X.clone().requires_grad_()
    divided = DividedBackward(_ends(model(again)), gradients, [again], parameters, whole=whole)
    (found,) = divided.inputs()
    assert not accumulated
    torch.testing.assert_close(found, x.grad, rtol=0, atol=1e-12)
    divided.weights()
    assert len(accumulated) == len(parameters)
    for p, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=0, atol=1e-12)


def test_the_second_pass_walks_no_way_to_the_input_again() -> None:
    walked: list[str] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            walked.append("")
            return gradient

    first, second = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
    x = X.clone().requires_grad_()
    end = second(Noted.apply(first(x)))
    parameters = [*first.parameters(), *second.parameters()]
    divided = DividedBackward([end], [torch.ones_like(end)], [x], parameters, whole=False)
    divided.inputs()
    divided.weights()
    assert len(walked) == 1


def test_a_parameter_that_wasnt_used_has_no_gradient() -> None:
    layer, unused = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
    x = X.clone().requires_grad_()
    parameters = [*layer.parameters(), *unused.parameters()]
    divided = DividedBackward([layer(x)], [torch.ones_like(x)], [x], parameters, whole=False)
    divided.inputs()
    divided.weights()
    assert layer.weight.grad is not None
    assert unused.weight.grad is None


def _ends(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [*output]
