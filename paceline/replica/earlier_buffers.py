"""A model's buffers before the next step's batches, where a forward before that step changes them.

    for x, y in loader:                 a batch begins
        with world.no_sync(): …         its forward changes BatchNorm's running statistics
    …
        with world.step(): …            a snapshot here is of the state before the first batch

A loop that accumulates gradients over several batches repeats all of them when it resumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


def named_buffers(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each buffer's name, those that aren't persistent included, its module and its key."""
    for prefix, module in modules.items():
        for key in module._buffers:
            yield f"{prefix}.{key}" if prefix else key, module, key


def computed_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield name, module and key of each buffer in the state dict that is no running statistic."""
    for name, module, key in named_buffers(dict(model.named_modules())):
        statistic = isinstance(module, _NormBase) and key in _STATISTICS
        if not statistic and key not in module._non_persistent_buffers_set:
            yield name, module, key


class EarlierBuffers:
    """Buffers as they were when the next step's first batch began.

    Attributes:
        due: whether the next forward that trains is to copy them first: a batch has begun.
        values: copies of the buffers, by name; None where the model's own are still the same.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.due = False
        self.values: Mapping[str, Tensor | None] | None = None

    def copy(self) -> None:
        """Copy the buffers, if the forward that begins trains, unless an earlier one did."""
        if self._model.training:
            self.due = False
            if self.values is None:
                buffers = named_buffers(dict(self._model.named_modules()))
                values = ((name, module._buffers[key]) for name, module, key in buffers)
                self.values = {n: None if value is None else value.clone() for n, value in values}

    def restore(self) -> None:
        """Put the copies back into the model: no step will train the batches."""
        buffers = named_buffers(dict(self._model.named_modules()))
        for name, module, key in buffers if self.values else ():
            value = (self.values or {}).get(name)
            buffer = module._buffers[key]
            if value is not None and buffer is not None:
                buffer.copy_(value)
        self.due = False
        self.values = None
