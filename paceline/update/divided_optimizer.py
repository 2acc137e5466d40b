"""A worker's optimizer whose state is divided among the processes that update by it.

The optimizer's class and hyperparameters are the user's; its own state is empty, because the
processes that update have it: the ranks, each for its shards (`shard_optimizer.py`), or servers.
`gather` assembles the whole state on rank 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError, Message
from paceline.reduce.buckets import Bucket, like
from paceline.reduce.rank_state import Ranges, gather_parts, join_ranges
from paceline.update.parameter_watch import ParameterGuard
from paceline.update.state_entries import SCALARS
from paceline.update.state_watch import plain_state, unwatch_state, watch_state
from paceline.update.updater import ELEMENTWISE, StepHyperparameters, is_bucketwise


@dataclass(frozen=True, kw_only=True)
class Division:
    """Division of an optimizer's state, as messages to its users name it.

    Attributes:
        flag: the option of a command.
        argument: the option of the library.
        where: the clause after "what" that says which part isn't here: "other ranks own".
        other_flag: the option of a command by which each rank has the whole state.
        other_argument: likewise, of the library.
    """

    flag: str
    argument: str
    where: str
    other_flag: str
    other_argument: str


def require_divisible(optimizer: Optimizer, division: Division) -> None:
    """Require an optimizer whose update can be divided by elements.

    Raises:
        ConfigError: its update is not element-wise, or its `step` was replaced.
    """
    if type(optimizer) not in ELEMENTWISE:
        kinds = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise ConfigError(
            Message(
                f"{division.flag} does not support {{}}, which is not known to update each element "
                f"by itself: use one of {{}}, or {division.other_flag}.",
                type(optimizer).__name__,
                kinds,
            )
        )
    if not is_bucketwise(optimizer):
        raise ConfigError(
            Message(
                f"{division.flag} updates by {{}}'s own step(), but this optimizer's step() "
                f"was replaced by another function: use {division.other_flag}, which calls it.",
                type(optimizer).__name__,
            )
        )


class DividedOptimizer(ABC):
    """Optimizer whose state is divided among processes; installs what these have updated.

    Args:
        optimizer: the user's optimizer, whose class and hyperparameters the updates use.
        buckets: all buckets.
        division: what divides the state.

    Attributes:
        update_count: the number of updates so far, the same on all ranks.

    Raises:
        ConfigError: as `require_divisible`; or parameters share memory, or get sparse gradients.
    """

    def __init__(self, optimizer: Optimizer, buckets: Sequence[Bucket], division: Division) -> None:
        require_divisible(optimizer, division)
        self._division = division
        self._buckets = buckets
        self._refuse_row_sparse()
        self._refuse_shared_memory()
        self._optimizer = optimizer
        self._strides = [[p.stride() for p in bucket.parameters] for bucket in buckets]
        self._guard = ParameterGuard(buckets)
        self._gathering = False
        self.update_count = 0
        self._undo: list[Callable[[], None]] = [
            optimizer.register_state_dict_pre_hook(self._refuse_state).remove,
            # A script's own `load_state_dict` brings the whole state, which is divided again.
            optimizer.register_load_state_dict_post_hook(lambda _: self.divide_state()).remove,
            lambda: unwatch_state(optimizer, self._refuse_use),
        ]

    def divide_state(self) -> None:
        """Divide the optimizer's present state, and clear its own."""
        self._take(plain_state(self._optimizer))
        self._clear()
        watch_state(self._optimizer, self._refuse_use)

    @abstractmethod
    def _take(self, state: Mapping[Tensor, Any]) -> None:
        """Take this process's part of the optimizer's state, by parameter."""

    @abstractmethod
    def local(self) -> Ranges:
        """Return this rank's part of the state: (start, stop, state) by the parameter's name."""

    @abstractmethod
    def restore_local(self, saved: Ranges) -> bool:
        """Take copies of what `local` returned, if this rank has the same part."""

    def load(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Divide a plain state dict's `state`, by the parameters' numbers."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for number, state in states.items():
            p = parameters[number]
            plain_state(self._optimizer)[p] = {
                name: value.to(p.device) if _lies_with(name, value, p) else value
                for name, value in state.items()
            }
        self.divide_state()

    def close(self) -> None:
        """Remove the hooks from the optimizer."""
        while self._undo:
            self._undo.pop()()

    def install(self, unit: tuple[Bucket, ...], values: Sequence[Tensor | None]) -> None:
        """Copy updated parameters of a unit, which is one bucket, into the model.

        Raises:
            ConfigError: a parameter was written since `freeze`, or its memory format has changed.
        """
        (bucket,) = unit
        self._guard.check(unit)
        self._refuse_other_strides(bucket)
        with torch.inference_mode(False), torch.no_grad():
            for p, value in zip(bucket.parameters, values, strict=True):
                assert value is not None
                p.copy_(value)

    def freeze(self) -> StepHyperparameters:
        """Take the optimizer's present hyperparameters for the updates to come."""
        self.update_count += 1
        self._guard.note()
        watch_state(self._optimizer, self._refuse_use)  # a script may have replaced it
        return StepHyperparameters.of(self._optimizer)

    def gather(self, communicator: Communicator) -> dict[str, Any] | None:
        """Return the whole optimizer's plain state dict on rank 0, None elsewhere; collective.

        Raises:
            CommError: a peer was lost, or silent.
            ConfigError: a parameter's memory format has changed.
        """
        for bucket in self._buckets:
            self._refuse_other_strides(bucket)
        what = "the gather of the optimizer state (collective: all ranks must call it)"
        parts = gather_parts(communicator, self.local(), what)
        return self.combine(parts) if parts else None

    def combine(self, parts: Sequence[Ranges]) -> dict[str, Any]:
        """Return the whole optimizer's plain state dict, given what `local` returned on all ranks.

        Its hyperparameters are the present ones.

        Raises:
            RankStateError: a part is missing, or parts differ.
        """
        states = {
            p: join_ranges(name, p, parts)
            for bucket in self._buckets
            for p, name in zip(bucket.parameters, bucket.names, strict=True)
        }
        present = {p for group in self._optimizer.param_groups for p in group["params"]}
        plain_state(self._optimizer).update({p: states[p] for p in states if p in present})
        self._gathering = True
        # By torch's own method, so that the numbering and the hooks are those of plain torch.
        plain: dict[str, Any] = self._optimizer.state_dict()
        self._gathering = False
        self._clear()
        return plain

    def _refuse_other_strides(self, bucket: Bucket) -> None:
        """Check that parameters have the memory format in which their fragments were cut."""
        known = zip(bucket.parameters, bucket.names, self._strides[bucket.index], strict=True)
        for p, name, stride in known:
            if p.stride() != stride:
                raise ConfigError(
                    Message(
                        "{} changed its memory format after sharding: call "
                        "model.to(memory_format=…) before parallelize(), or use "
                        f"{self._division.other_flag}.",
                        name,
                    )
                )

    def _clear(self) -> None:
        """Clear the optimizer's state of exchanged parameters; that of frozen ones stays."""
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                plain_state(self._optimizer).pop(parameter, None)

    def _refuse_state(self, _: Optimizer) -> None:
        if not self._gathering:
            raise ConfigError(
                f"with {self._division.argument}, optimizer.state_dict() would contain only this "
                "rank's shard: call world.checkpoint(), which writes the complete state."
            )

    def _refuse_use(self) -> None:
        if not self._gathering:
            raise ConfigError(
                f"with {self._division.argument}, optimizer.state would contain nothing of what "
                f"{self._division.where}: use {self._division.other_argument} to read or change "
                "it, or to call optimizer.step() outside world.step()."
            )

    def _refuse_row_sparse(self) -> None:
        for bucket in self._buckets:
            if bucket.row_sparse:
                raise ConfigError(
                    Message(
                        f"{self._division.flag} does not support the sparse gradients of {{}}: "
                        f"use {self._division.other_flag}, or create the layer with sparse=False.",
                        bucket.names[0],
                    )
                )

    def _refuse_shared_memory(self) -> None:
        """Refuse parameters whose memory overlaps: the owners of their shards undo each other."""
        places = []
        for bucket in self._buckets:
            for p, name in zip(bucket.parameters, bucket.names, strict=True):
                if p.numel():
                    extent = 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
                    places.append((p.data_ptr(), p.data_ptr() + extent * p.element_size(), name))
        # Sorted by address: if any two overlap, so do two adjacent ones.
        places.sort()
        for (_, end, one), (start, _, other) in pairwise(places):
            if start < end:
                raise ConfigError(
                    Message(
                        f"{{}} and {{}} are two Parameters over the same memory, which "
                        f"{self._division.flag} does not support: register one Parameter in both "
                        f"places, or use {self._division.other_flag}.",
                        one,
                        other,
                    )
                )


def cut_state(state: Mapping[str, Any], parameter: Tensor, start: int, stop: int) -> dict[str, Any]:
    """Copy the optimizer state of a parameter's values from `start` to `stop`, in flat order."""
    return {name: _cut_entry(name, value, parameter, start, stop) for name, value in state.items()}


def _cut_entry(name: str, value: Any, parameter: Tensor, start: int, stop: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not _lies_with(name, value, parameter):
        return value.clone()
    return flat_as(parameter, value)[start:stop].clone()


def _lies_with(name: str, value: Any, parameter: Tensor) -> bool:
    """Return whether a state has a value for each of its parameter's."""
    return isinstance(value, Tensor) and name not in SCALARS and value.shape == parameter.shape


def flat_of(tensor: Tensor) -> Tensor:
    """View a tensor, or copy it, (numel,), in the order of `like`."""
    tensor = tensor.detach()
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    if tensor.is_contiguous() or not dense:
        return tensor.reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def flat_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Copy a tensor, (numel,), in the order of its parameter."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    like(parameter, flat).copy_(tensor)
    return flat
