"""Norm of a divided model's gradients: torch's functions return that of all ranks' parts.

    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) ─▶ torch.nn.utils.get_total_norm(…)
        model of this rank alone      the norm of its gradients
        part of a divided model       the norm of the norms that all ranks along its axes have

Each gradient is counted once: what several ranks have, one of them counts. For DTensors torch does
the same, but parts are plain tensors, and torch has no hook there. So its function is wrapped until
the process ends. It becomes a collective call along the axes, as it is for DTensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from paceline.generation.run import Run

_OPERATION = "the norm of all gradients"
_lock = threading.Lock()  # guards `_divided`


@dataclass(frozen=True)
class _Division:
    """Division of a model along one axis.

    Attributes:
        run: whose ranks have the other parts.
        axis: along which they are.
        elsewhere: the parameters here that another rank counts.
    """

    run: Run
    axis: str
    elsewhere: frozenset[Tensor]


_divided: WeakKeyDictionary[nn.Module, dict[str, _Division]] = WeakKeyDictionary()


def count_once(part: nn.Module, run: Run, axis: str, elsewhere: Iterable[Tensor]) -> None:
    """Let torch's norm of a module's gradients be that of all parts along an axis.

    Args:
        part: this rank's.
        run: whose ranks have the other parts.
        axis: of the mesh.
        elsewhere: parameters of the part whose gradients another rank counts.
    """
    with _lock:
        plain = clip_grad._get_total_norm
        if not hasattr(plain, "_counts_parts"):
            # `clip_grad_norm_` finds it by this name, however a script has imported that one.
            clip_grad._get_total_norm = _counting_parts(plain)
            nn.utils.get_total_norm = clip_grad._get_total_norm
        _divided.setdefault(part, {})[axis] = _Division(run, axis, frozenset(elsewhere))


def _counting_parts(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(plain)
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        divisions = _divisions_of(gradients)
        elsewhere = {id(_gradient(p)) for division in divisions for p in division.elsewhere}
        own = [gradient for gradient in gradients if id(gradient) not in elsewhere]
        if not divisions:
            return plain(own, norm_type, error_if_nonfinite, foreach)
        norm = plain(own, norm_type, False, foreach)
        for division in divisions:
            norm = plain(_gathered(division, norm), norm_type)
        if gradients:  # a part without any has no dtype, and no use for one
            norm = norm.to(gradients[0])
        # The error comes last, and so on all ranks.
        return plain([norm], norm_type, error_if_nonfinite)

    get_total_norm._counts_parts = True  # type: ignore[attr-defined]
    return get_total_norm


def _divisions_of(gradients: Sequence[Tensor]) -> Sequence[_Division]:
    """Return how the model of some gradients is divided.

    Gradients that aren't there, as those of a frozen stage, are of the last model that was divided.
    """
    given = {id(gradient) for gradient in gradients}
    with _lock:
        parts = [*_divided.items()]
    for part, divisions in reversed(parts):
        if not given or any(id(_gradient(p)) in given for p in part.parameters()):
            return [*divisions.values()]
    return ()


def _gradient(parameter: Tensor) -> Tensor | None:
    """Return a parameter's gradient as it is: this is no use of it by the script."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def _gathered(division: _Division, norm: Tensor) -> list[Tensor]:
    """Return the norms of all parts along an axis, in rank order; collective."""
    communicator = division.run.context.group(division.axis, "steps")
    own = norm.detach().cpu().double()
    norms = [torch.empty_like(own) for _ in range(communicator.world_size)]
    communicator.all_gather(own, norms).wait(_OPERATION)
    return norms
