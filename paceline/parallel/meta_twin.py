"""Meta twin of a whole model: it has no values, but shows which operations run on which shapes.

    whole       model(x)                            both run on the meta device, with the same
    composed    block(… block(block(x)))            parameters: their operations must be the same

So every rank computes the shapes between stages alone, no forward runs twice on real values, and a
model whose forward does something else between its blocks is found out before the first step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from paceline.errors import ConfigError
from paceline.parallel.blocks import Glue, can_travel, run_blocks

MOST_TENSORS = 64
"""How many tensors travel from one stage to the next at most."""


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor that travels between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The size of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Boundary = tuple[TensorSpec, ...]
"""The tensors that a stage returns."""


class MetaTwin:
    """Meta twin of a model and of the parts of its stages.

    Args:
        model: the whole model, none of whose memory is copied.
        parts: for each stage, children of the model, as `take_part` returns them.
        glue: what is between the children.

    Attributes:
        whole: the twin of the model.
        parts: those of the parts.
    """

    def __init__(self, model: nn.Module, parts: Sequence[Mapping[str, Any]], glue: Glue) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        memo: dict[int, Any] = {id(tensor): _on_meta(tensor) for tensor in tensors}
        self.whole = copy.deepcopy(model, memo)
        self.parts = copy.deepcopy([*parts], memo)  # their modules are those of the whole
        for norm in self.whole.modules():
            if isinstance(norm, _NormBase) and norm.momentum is None:
                norm.momentum = 0.0  # a cumulative average reads how many there were
        self._glue = glue
        self._checked = False

    def boundaries(self, x: TensorSpec) -> list[Boundary]:
        """Return what each stage returns for a batch.

        Raises:
            ConfigError: the stages aren't the whole model, return what isn't tensors, or can't run
                on the meta device.
        """
        value: Any = torch.empty(x.shape, dtype=x.dtype, device="meta")
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                composed = self._trace(value)
                if not self._checked:
                    _require_same(_Operations(self.whole).of(self.whole, value), composed)
                    self._checked = True
                found = []
                for stage, part in enumerate(self.parts):
                    value = run_blocks(part, self._glue, value)
                    found.append(_boundary(value, stage, last=part is self.parts[-1]))
                return found
            except ConfigError:
                raise
            except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                said = str(error).partition("\n")[0] or type(error).__name__
                raise ConfigError(
                    f"the model can't run on a batch of shape {x.shape} on the meta device, where "
                    f"the shapes between its stages are computed: {said}; "
                    "give a batch that the model takes, and use operations whose results' shapes "
                    "follow from shapes alone."
                ) from error

    def _trace(self, value: Tensor) -> list[Any]:
        def composed(value: Any) -> Any:
            for part in self.parts:
                value = run_blocks(part, self._glue, value)
            return value

        return [] if self._checked else _Operations(self.whole).of(composed, value)


class _Operations(TorchDispatchMode):
    """Dispatch mode that lists operations: each with the numbers of its operands and results."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[Tensor] = [*model.parameters(), *model.buffers()]
        self._numbers = {id(tensor): n for n, tensor in enumerate(self._kept)}
        self._seen: list[Any] = []

    def of(self, function: Any, value: Tensor) -> list[Any]:
        """Return the operations of a function, and what it returns."""
        with self:
            result = function(value)
        return [*self._seen, ("what it returns", tree_map(self._number, result))]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self._seen.append((str(func), tree_map(self._number, (args, kwargs, result))))
        return result

    def _number(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return str(value)
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._numbers)
            self._kept.append(value)  # or another tensor could get its id
        return self._numbers[id(value)], tuple(value.shape)


def _require_same(whole: Sequence[Any], composed: Sequence[Any]) -> None:
    if whole == composed:
        return
    names = [name for name, _ in whole], [name for name, _ in composed]
    both = zip(whole, composed, strict=False)
    first = next((n for n, (a, b) in enumerate(both) if a != b), 0)
    raise ConfigError(
        f"the model isn't its blocks one after the other: its operation {first + 1:,} is "
        f"{names[0][first]}, and that of its blocks is {names[1][first]}. Give what forward does "
        "between children a module of its own, name the children that run in blocks=, or pass a "
        "torch.nn.Sequential."
    )


def _boundary(value: object, stage: int, *, last: bool) -> Boundary:
    tensors = value if isinstance(value, tuple) else (value,)
    if not can_travel(tuple(tensors) if last else value):
        raise ConfigError(
            f"stage {stage} returns {type(value).__name__}, but only a tensor or a tuple of "
            "tensors travels between stages: cut the model at another block, or return tensors."
        )
    if len(tensors) > MOST_TENSORS:
        raise ConfigError(
            f"stage {stage} returns {len(tensors)} tensors, but at most {MOST_TENSORS} travel "
            "between stages: cut the model at another block, or join them."
        )
    return tuple(TensorSpec(tuple(one.shape), one.dtype) for one in tensors)


def _on_meta(tensor: Tensor) -> Tensor:
    twin = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin
