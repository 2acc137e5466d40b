"""Changes of the trained parameters between the steps of the equivalence grid.

They are done to model and optimizer before each step, with its number; new values differ by rank,
which must not matter: rank 0's count.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer


def freeze(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
    """Freeze the first layer before step 3."""
    if number == 3:
        model[0].requires_grad_(False)  # type: ignore[index]


def unfreeze(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
    """Unfreeze everything before step 2."""
    if number == 2:
        model.requires_grad_(True)


def toggle(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
    """Freeze the last layer's bias in every other step."""
    model[6].bias.requires_grad_(number % 2 == 0)  # type: ignore[index]


def add_group(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
    """Put another layer behind the last before step 2, in a group of its own."""
    if number == 2:
        model.append(_linear(10, rank))  # type: ignore[operator]
        optimizer.add_param_group({"params": list(model[7].parameters()), "lr": 0.03})  # type: ignore[index]


def replace_head(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
    """Put another layer, with a buffer, in place of the last before step 2."""
    if number == 2:
        old = list(model[6].parameters())  # type: ignore[index]
        model[6] = _linear(128, rank)  # type: ignore[operator]
        model[6].register_buffer("made_by", torch.full((1,), float(rank)))  # type: ignore[index]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if all(p is not o for o in old)]
        optimizer.add_param_group({"params": list(model[6].parameters()), "lr": 0.03})  # type: ignore[index]


def regroup(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
    """Move a parameter to the group without weight decay before step 2."""
    if number == 2:
        moved = optimizer.param_groups[0]["params"].pop()
        optimizer.param_groups[1]["params"].append(moved)


def _linear(inputs: int, rank: int) -> nn.Linear:
    layer = nn.Linear(inputs, 10).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p) + rank)
    return layer
