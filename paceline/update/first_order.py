"""First-order layers: they refuse, in a sentence, what differentiates them in other ways.

A layer over all ranks has a backward of its own. A second differentiation would take that
backward's collectives for constants and be wrong without a word, and forward mode has no rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from paceline.errors import ConfigError


def require_plain_backward(layer: str) -> None:
    """Require that a layer's forward is outside of forward-mode AD and torch.func's transforms.

    Raises:
        ConfigError: it isn't; names the layer.
    """
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise _refused(layer, "called in forward-mode differentiation or a transform of torch.func")


def final_gradients(gradients: Sequence[Tensor | None], layer: str) -> tuple[Tensor | None, ...]:
    """Return what a backward returns: gradients whose own differentiation raises ConfigError."""
    # Autograd runs a backward with gradients enabled only where it builds a graph of it.
    if not torch.is_grad_enabled():  # no create_graph=True
        return tuple(gradients)
    return tuple(None if gradient is None else _Final.of(gradient, layer) for gradient in gradients)


class _Final(torch.autograd.Function):
    """Autograd function: a gradient that isn't differentiated again."""

    @staticmethod
    def of(gradient: Tensor, layer: str) -> Tensor:
        final: Tensor = _Final.apply(  # type: ignore[no-untyped-call]
            gradient.detach().requires_grad_(), layer
        )
        return final

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, layer: str) -> Tensor:
        ctx.layer = layer
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        raise _refused(ctx.layer, "differentiated twice (by a gradient penalty, say)")


def _refused(layer: str, what: str) -> ConfigError:
    return ConfigError(
        f"{layer} is {what}, which is not supported with sync_bn=True, because its result depends "
        "on the other ranks' samples: use nn.GroupNorm or nn.LayerNorm there, or pass "
        "sync_bn=False."
    )
