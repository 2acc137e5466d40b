"""Checksum of what a model is given in a step's first forward: equal samples have equal ones.

    args, kwargs ── tensors ── up to 2^14 values of each, as float64 ── a sum of their bits

Where a script calls a layer or a method instead of the model, or gives the model an object of its
own, it is that of what the first layer is given. It is computed on the device of the tensors, and
read once it has arrived, so that no step waits for it.
Tensors whose values are all equal, such as zeros, don't count. A gradient's checksum wouldn't do:
with dropout it differs between ranks that have the same samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves

from paceline.comm.host_copy import HostCopy
from paceline.replica.compiled_modules import is_compiled
from paceline.replica.live_hooks import LiveHook, replace

_VALUES = 2**14  # of a tensor: evenly distributed over it
_BITS = 2**40 - 1  # so that a float64 holds a checksum exactly
_ODD = 0x5851F42D4C957F2D  # a multiplier of known quality, of a linear congruential generator


class InputChecksum:
    """Checksums of a model's inputs, step by step.

    Args:
        model: the model, which may be compiled.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._step: int | None = None  # whose first forward is still to come
        self._found: dict[int, tuple[HostCopy, int]] = {}
        if model._compiled_call_impl is not None:
            inner: Any = model._compiled_call_impl

            def call(*args: Any, **kwargs: Any) -> Any:
                self._look(model, args, kwargs)
                return inner(*args, **kwargs)

            self._undo = replace(model, "_compiled_call_impl", call)
        else:
            self._undo = self._hook(model)

    def _hook(self, model: nn.Module) -> Callable[[], None]:
        """Look at the model's inputs, and at those of its layers; return what undoes that."""
        modules = list(model.modules())
        if any(is_compiled(module) for module in modules):
            modules = [model]  # hooks of others would be compiled, too
        handles = [
            module.register_forward_pre_hook(LiveHook(self._look), prepend=True, with_kwargs=True)
            for module in modules
        ]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    def begin(self, step: int) -> None:
        """Let the next forward be the first of a step."""
        self._step = step

    def take(self, step: int) -> tuple[int, int]:
        """Return a step's checksum, 0 where there is none, and the number of values that it has."""
        copy, values = self._found.pop(step, (None, 0))
        known = None if copy is None else copy.known()
        return (0, 0) if known is None else (int(known[0]), values)

    def close(self) -> None:
        """Look at no further forward."""
        self._step = None
        self._undo()
        self._found.clear()

    def _look(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self._step is None:
            return
        step = self._step
        if _capturing():
            self._step = None
            return
        tensors = [one for one in tree_leaves((args, kwargs)) if is_readable(one)]
        if module is not self._model:  # a layer may be given what follows from parameters
            tensors = [one for one in tensors if not one.requires_grad]
        if tensors:
            self._step = None
            values = sum(one.numel() for one in tensors)
            self._found[step] = HostCopy(values_checksum(tensors)), values


def _capturing() -> bool:
    """Return whether a CUDA graph is being captured, which would repeat the checksum."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_readable(value: object) -> bool:
    """Return whether a value is a plain tensor with values, on a device that can be asked later."""
    return (
        type(value) is Tensor
        and value.numel() > 0
        and value.layout is torch.strided
        and value.device.type in ("cpu", "cuda")
        and not value.is_quantized
        and not is_functorch_wrapped_tensor(value)
    )


@torch.no_grad()
def values_checksum(tensors: list[Tensor]) -> Tensor:
    """Return the checksum of tensors, (1,) int64 on the device of the first one."""
    total = torch.zeros(1, dtype=torch.int64, device=tensors[0].device)
    for number, tensor in enumerate(tensors):
        if tensor.device != total.device:
            continue
        stride = tensor.numel() // _VALUES | 1  # odd: a table's columns all have their turn
        places = torch.arange(0, tensor.numel(), stride, device=tensor.device)
        real = torch.view_as_real(tensor)[..., 0] if tensor.is_complex() else tensor
        bits = torch.take(real, places).double().view(torch.int64)
        mixed = (bits ^ (bits >> 32)) * (2 * places + 1) * _ODD  # modulo 2^64
        own = (mixed ^ (mixed >> 29)).sum() * (2 * number + 1)
        total += own * (bits != bits[0]).any()
    return total & _BITS
