"""Exponential moving average of a model's weights (`--ema`), which is evaluated in their place.

    average = w_1 after the first step,     decay · average + (1 − decay) · w_t after step t

Updates of a step arrive while the next one runs forward. So the weights of step t are averaged
after the forward of step t + 1, which has read them, or at the epoch's end: nothing waits for them.
All ranks have the same weights, and so the same average.

Buffers, such as BatchNorm's running statistics, are not averaged: the evaluated model has the
present ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.run.extension import Extension
from paceline.state.stateful import Restorable


class MovingAverage(Extension):
    """Moving average of a model's parameters, as a second model.

    Args:
        model: whose parameters are averaged; not bound to a replica yet.
        decay: the average's weight in each step, below 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._trained = model
        self._average = copy.deepcopy(model).requires_grad_(False).eval()
        self._decay = decay
        self._steps = 0  # whose weights are in the average

    def state_dict(self) -> dict[str, Any]:
        """Return the average, and the number of steps in it."""
        return {"steps": self._steps, "model": self._average.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._steps = state["steps"]
        self._average.load_state_dict(state["model"])

    def entries(self) -> Mapping[str, Restorable]:
        """Return the average, which is saved."""
        return {"ema": self}

    def evaluated(self, model: nn.Module) -> nn.Module:
        """Return the average, as a model."""
        return self._average

    @torch.no_grad()
    def after_forward(self, steps: int) -> None:
        """Average the model's weights, which are those after so many steps, unless it was done."""
        if steps == self._steps:
            return
        averages = [parameter.detach() for parameter in self._average.parameters()]
        weights = [parameter.detach() for parameter in self._trained.parameters()]
        if self._steps == 0:
            torch._foreach_copy_(averages, weights)
        else:
            torch._foreach_lerp_(averages, weights, 1 - self._decay)
        self._steps = steps

    @torch.no_grad()
    def end_steps(self, steps: int) -> None:
        """Average the weights after an epoch's last step, and take the present buffers."""
        self._trained.state_dict()  # completes what is under way
        self.after_forward(steps)
        buffers = zip(self._average.buffers(), self._trained.buffers(), strict=True)
        for own, present in buffers:
            own.copy_(present)
