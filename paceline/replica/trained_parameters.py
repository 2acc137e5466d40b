"""Trained parameters: those exchanged now, and a check whether some were frozen or added.

A parameter is exchanged if the optimizer has it and it isn't frozen, be it the model's or not (a
loss's own, say). Layers may be frozen and unfrozen, and parameters and groups added to the
optimizer, between any two steps; all ranks do the same at the same step. Each step begins with a
comparison of `fingerprint`, a few facts a parameter: about 20 microseconds for a ResNet-50.

A parameter is row-sparse if only layers with `sparse=True` register it: of `nn.Embedding` and
`nn.EmbeddingBag`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.errors import ConfigError
from paceline.update.updater import takes_sparse_gradients

_MIN_TABLE_BYTES = 2**20  # a smaller table's zeros cost too little of a step

# A device object takes twice as long to make and compare as its number.
_FACTS = attrgetter("requires_grad"), attrgetter("dtype"), Tensor.get_device


@dataclass(frozen=True, kw_only=True, eq=False)
class Scope:
    """Scope of a replica: what it has of its model, where several optimizers train that model.

    The first optimizer's replica has all that no other one has: parameters that none of the
    optimizers has, and the buffers.

    Attributes:
        first: whether the replica's optimizer is the model's first one.
        others: the model's other optimizers.
    """

    first: bool = True
    others: Sequence[Optimizer] = ()

    def names(self, model: nn.Module, optimizer: Optimizer) -> dict[nn.Parameter, str]:
        """Return the names of the model's parameters that are in the scope."""
        if self.first and not self.others:
            return {p: name for name, p in model.named_parameters()}
        optimizers = self.others if self.first else [optimizer]
        listed = {p for one in optimizers for group in one.param_groups for p in group["params"]}
        return {p: name for name, p in model.named_parameters() if (p in listed) is not self.first}


WHOLE = Scope()


class Fingerprint:
    """Fingerprint of an optimizer's present parameters; compared to detect changes.

    Args:
        optimizer: the optimizer, whose parameters, and their freezing, dtypes and devices count.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = [[*group["params"]] for group in optimizer.param_groups]
        self._facts = [[*map(fact, group)] for group in self._groups for fact in _FACTS]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Fingerprint)
            and self.lists(other._groups)
            and self._facts == other._facts
        )

    def lists(self, groups: Sequence[Sequence[nn.Parameter]]) -> bool:
        """Return whether the groups have the parameters that the fingerprint has, as objects."""
        return [*map(len, groups)] == [*map(len, self._groups)] and all(
            all(map(is_, *pair)) for pair in zip(groups, self._groups, strict=True)
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedParameters:
    """Trained parameters: their names, groups and freezing state.

    Attributes:
        fingerprint: of the optimizer's parameters.
        names: the name of each parameter, its own. The model's parameters come first, in the
            model's order; then the parameters that only the optimizer has.
        groups: for each parameter, the index of its group in the optimizer.
        buffers: the model's buffers, those in the scope.
        row_sparse: the parameters that get row-sparse gradients; none where the optimizer takes no
            sparse gradients.
        unowned: the model's parameters that no optimizer has, frozen or not.
    """

    fingerprint: Fingerprint
    names: dict[nn.Parameter, str]
    groups: dict[nn.Parameter, int]
    buffers: tuple[Tensor, ...]
    row_sparse: frozenset[nn.Parameter]
    unowned: tuple[nn.Parameter, ...]

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer, scope: Scope = WHOLE) -> TrainedParameters:
        """List the present parameters of model and optimizer.

        Args:
            optimizer: its optimizer, or one of them.
            scope: which of the model's parameters to list.

        Raises:
            ConfigError: a lazy module has no shapes yet.
        """
        names = scope.names(model, optimizer)
        groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        unowned = tuple(p for p in names if p not in groups)
        others = [p for p in groups if p not in names]
        counts: Counter[tuple[int, ...]] = Counter()
        for p in others:
            counts[p.shape] += 1
            which = "a parameter" if counts[p.shape] == 1 else f"parameter {counts[p.shape]}"
            names[p] = f"{which} of shape {tuple(p.shape)}, not the model's,"
        buffers = dict(model.named_buffers()) if scope.first else {}
        for name, tensor in chain(((name, p) for p, name in names.items()), buffers.items()):
            require_whole(name, tensor)
        return TrainedParameters(
            fingerprint=Fingerprint(optimizer),
            names=names,
            groups=groups,
            buffers=tuple(buffers.values()),
            row_sparse=row_sparse_parameters(model)
            if takes_sparse_gradients(optimizer)
            else frozenset(),
            unowned=unowned,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that must be equal on all ranks."""
        return [*self.names, *self.buffers]


def require_whole(name: str, tensor: Tensor) -> None:
    """Require that a parameter or buffer is a whole tensor with values in memory of its own.

    Raises:
        ConfigError: it has no shape yet, is a part of a tensor, is made of other tensors, or some
            of its elements are in the same memory.
    """
    if is_lazy(tensor):
        raise ConfigError(
            f"{name} is uninitialised (lazy): run one batch through the model before "
            "paceline.parallelize()."
        )
    kind = type(tensor).__name__
    if kind == "DTensor":
        raise ConfigError(
            f"{name} is a DTensor, of which each rank may have a part (FSDP2's fully_shard(), "
            "tensor parallelism): give paceline.parallelize() a model of whole tensors, or one "
            'that paceline.tensor_parallel() divides. update="sharded" divides the optimizer\'s '
            "state among the ranks."
        )
    if is_traceable_wrapper_subclass(tensor):
        raise ConfigError(
            f"{name} is a {kind}, which is made of other tensors (quantised ones, say): give "
            "paceline.parallelize() a model of plain tensors, and convert it after the training."
        )
    # By the strides: most of torch's functions use the values, for which a step would wait.
    if tensor.layout is torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ConfigError(
            f"{name} has elements that share memory, as expand() makes them, so that nothing can "
            "be written to it: register a copy, by clone() or contiguous()."
        )


def table_parameters(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the large weights of dense embedding layers that no other kind of layer registers.

    Backward makes a dense gradient of each, which is zero but for the rows that the batch used.
    """
    tables = _embedding_parameters(model, sparse=False)
    large = (p for p in tables if not is_lazy(p) and p.nbytes >= _MIN_TABLE_BYTES)
    return frozenset(p for p in large if p.ndim == 2)


def row_sparse_parameters(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the parameters that only embedding layers with `sparse=True` register."""
    return _embedding_parameters(model, sparse=True)


def _embedding_parameters(model: nn.Module, *, sparse: bool) -> frozenset[nn.Parameter]:
    """Return the parameters that only embedding layers with this value of `sparse` register."""
    found: set[nn.Parameter] = set()
    others: set[nn.Parameter] = set()
    for module in model.modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        fits = is_embedding and bool(module.sparse) is sparse
        (found if fits else others).update(module.parameters(recurse=False))
    return frozenset(found - others)
