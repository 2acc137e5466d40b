"""Updates of a rank's shards (ZeRO-1): torch's optimizer over the fragments of parameters in them.

    bucket     [ a              | b         | c                  ]
    shards     [ rank 0              | rank 1                    ]
    fragments  [ a              | b  ] [ b  | c                  ]     of one parameter each

A fragment is flat, in the order in which its parameter lies in memory. A rank holds the optimizer's
state of its own fragments, 1/N of the whole; `gather` assembles the whole state on rank 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError, Message
from paceline.reduce.buckets import Bucket, like
from paceline.reduce.rank_state import Ranges, gather_parts, join_ranges, same_ranges
from paceline.update.parameter_watch import ParameterGuard
from paceline.update.state_entries import SCALARS, restore_entries
from paceline.update.state_watch import plain_state, unwatch_state, watch_state
from paceline.update.updater import ELEMENTWISE, StepHyperparameters, SubOptimizer, is_bucketwise


@dataclass(frozen=True, kw_only=True, eq=False)
class _Fragment:
    """Fragment of a parameter: the range of its values that lies in this rank's shard.

    Attributes:
        bucket: index of the parameter's bucket.
        index: index of the parameter in its bucket.
        parameter: the parameter.
        start, stop: the range, as indices in the flattened parameter.
        memory: (stop - start,), the gradient sums of these values; a view of the shard's memory.
        values: (stop - start,), the values as a parameter of the sub-optimizer.
    """

    bucket: int
    index: int
    parameter: nn.Parameter
    start: int
    stop: int
    memory: Tensor
    values: nn.Parameter


class ShardOptimizer:
    """Sharded optimizer: updates this rank's shard of each bucket (ZeRO-1).

    Args:
        optimizer: the user's optimizer, whose class and hyperparameters the updates use.
        buckets: all buckets.

    Attributes:
        version: the number of updates so far, the same on all ranks.

    Raises:
        ConfigError: the optimizer's update is not element-wise, or its `step` was replaced; or
            parameters share memory, or get sparse gradients.
    """

    def __init__(self, optimizer: Optimizer, buckets: Sequence[Bucket]) -> None:
        if type(optimizer) not in ELEMENTWISE:
            kinds = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
            raise ConfigError(
                Message(
                    "{--update} sharded does not support {}, because its update is not "
                    "element-wise: use one of {}, or {--update} replicated.",
                    type(optimizer).__name__,
                    kinds,
                )
            )
        if not is_bucketwise(optimizer):
            raise ConfigError(
                Message(
                    "{--update} sharded updates by {}'s own step(), but this optimizer's step() "
                    "was replaced by another function: use {--update} replicated, which calls it.",
                    type(optimizer).__name__,
                )
            )
        _refuse_row_sparse(buckets)
        _refuse_shared_memory(buckets)
        self._optimizer = optimizer
        self._buckets = buckets
        self._state: dict[Tensor, Any] = defaultdict(dict)
        self._fragments: dict[int, list[_Fragment]] = {}
        self._sub_optimizers: dict[int, SubOptimizer] = {}
        self._strides = [[p.stride() for p in bucket.parameters] for bucket in buckets]
        self._guard = ParameterGuard(buckets)
        self._gathering = False
        self.update_count = 0
        self._undo: list[Callable[[], None]] = [
            optimizer.register_state_dict_pre_hook(self._refuse_state).remove,
            # A script's own `load_state_dict` brings the whole
            # state, of which this rank retains its part.
            optimizer.register_load_state_dict_post_hook(lambda _: self.shard_state()).remove,
            lambda: unwatch_state(optimizer, self._refuse_use),
        ]

    def add_shard(self, index: int, shard: slice, memory: Tensor) -> None:
        """Take a bucket's shard: the range of its values, and the memory of its sums, (values,)."""
        bucket = self._buckets[index]
        ends = list(accumulate(p.numel() for p in bucket.parameters))
        fragments = self._fragments[index] = []
        for number, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
            start = max(first, shard.start)
            stop = min(last, shard.stop)
            if start < stop:
                fragment = _Fragment(
                    bucket=index,
                    index=number,
                    parameter=bucket.parameters[number],
                    start=start - first,
                    stop=stop - first,
                    # A view: the reduced sums come here, and the
                    # updated values leave from here, uncopied.
                    memory=memory[start - shard.start : stop - shard.start],
                    values=nn.Parameter(memory.new_empty(stop - start)),
                )
                fragments.append(fragment)
        if fragments:
            param_groups = {fragment.values: bucket.param_group for fragment in fragments}
            self._sub_optimizers[index] = SubOptimizer(self._optimizer, param_groups, self._state)

    def shard_state(self) -> None:
        """Take this rank's shards of the optimizer's state, and clear the optimizer's own."""
        state = plain_state(self._optimizer)
        for fragments in self._fragments.values():
            for fragment in fragments:
                self._state[fragment.values] = {
                    name: _shard_of(name, value, fragment)
                    for name, value in state.get(fragment.parameter, {}).items()
                }
        self._clear()
        watch_state(self._optimizer, self._refuse_use)

    def load(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Take this rank's shards of a plain state dict's `state`, by the parameters' numbers."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for number, state in states.items():
            p = parameters[number]
            plain_state(self._optimizer)[p] = {
                name: value.to(p.device) if _lies_with(name, value, p) else value
                for name, value in state.items()
            }
        self.shard_state()

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

    def freeze(self) -> None:
        """Take the optimizer's present hyperparameters for the updates to come."""
        self.update_count += 1
        self._guard.note()
        watch_state(self._optimizer, self._refuse_use)  # a script may have replaced it
        hyperparameters = StepHyperparameters.of(self._optimizer)
        for sub_optimizer in self._sub_optimizers.values():
            sub_optimizer.freeze(hyperparameters)

    def copy_gradients(self, index: int) -> list[Tensor | None]:
        """Copy the present gradients of a bucket's fragments, to be given to `update`."""
        gradients: list[Tensor | None] = []
        for fragment in self._fragments.get(index, ()):
            gradient = fragment.parameter.grad
            whole = None if gradient is None else _flat_as(fragment.parameter, gradient)
            gradients.append(None if whole is None else whole[fragment.start : fragment.stop])
        return gradients

    def update(
        self, index: int, used: Sequence[int], given: Sequence[Tensor | None] | None
    ) -> None:
        """Replace the sums of this rank's shard by updated parameters.

        Args:
            index: the bucket's index.
            used: (parameters,), 0 where no rank used one, if the gradients are the sums.
            given: gradients to use in place of the sums, one a fragment.
        """
        fragments = self._fragments[index]
        if not fragments:
            return
        # An unused parameter has a sum of zeros, which momentum or weight decay would turn into an
        # update; with None torch leaves it as it is on one rank.
        if given is None:
            given = [fragment.memory if used[fragment.index] else None for fragment in fragments]
        with torch.no_grad():
            for fragment in fragments:
                # Anew in each step: a script may have written the parameter since the last one.
                fragment.values.copy_(_flat(fragment.parameter)[fragment.start : fragment.stop])
        self._sub_optimizers[index].step(given)
        with torch.no_grad():
            for fragment in fragments:
                fragment.memory.copy_(fragment.values)

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

    def local(self) -> Ranges:
        """Return this rank's shards of the state: (start, stop, state) of each parameter."""
        return {
            self._buckets[fragment.bucket].names[fragment.index]: (
                fragment.start,
                fragment.stop,
                self._state[fragment.values],
            )
            for fragments in self._fragments.values()
            for fragment in fragments
        }

    def restore_local(self, saved: Ranges) -> bool:
        """Take copies of what `local` returned, if this rank has the same shards."""
        if not same_ranges(self.local(), saved):
            return False
        for fragments in self._fragments.values():
            for fragment in fragments:
                name = self._buckets[fragment.bucket].names[fragment.index]
                group = self._optimizer.param_groups[self._buckets[fragment.bucket].param_group]
                state = self._state[fragment.values]
                restore_entries(state, saved[name][2], fragment.values, group)
        return True

    def _refuse_other_strides(self, bucket: Bucket) -> None:
        """Check that parameters have the memory format in which their fragments were cut."""
        known = zip(bucket.parameters, bucket.names, self._strides[bucket.index], strict=True)
        for p, name, stride in known:
            if p.stride() != stride:
                raise ConfigError(
                    Message(
                        "{} changed its memory format after sharding: call "
                        "model.to(memory_format=…) before parallelize(), or use "
                        "{--update} replicated.",
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
                "with update='sharded', optimizer.state_dict() would contain only this rank's "
                "shard: call world.checkpoint(), which writes the complete state."
            )

    def _refuse_use(self) -> None:
        if not self._gathering:
            raise ConfigError(
                "with update='sharded', optimizer.state would contain nothing of what other ranks "
                "own: use update='replicated' to read or change it, or to call optimizer.step() "
                "outside world.step()."
            )


def _refuse_row_sparse(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        if bucket.row_sparse:
            raise ConfigError(
                Message(
                    "{--update} sharded does not support the sparse gradients of {}: use "
                    "{--update} replicated, or create the layer with sparse=False.",
                    bucket.names[0],
                )
            )


def _refuse_shared_memory(buckets: Sequence[Bucket]) -> None:
    """Refuse parameters whose memory overlaps: the owners of their shards would undo each other."""
    places = []
    for bucket in buckets:
        for p, name in zip(bucket.parameters, bucket.names, strict=True):
            if p.numel():
                extent = 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
                places.append((p.data_ptr(), p.data_ptr() + extent * p.element_size(), name))
    # Sorted by address: if any two overlap, so do two neighbours.
    places.sort()
    for (_, end, one), (start, _, other) in pairwise(places):
        if start < end:
            raise ConfigError(
                Message(
                    "{} and {} are two Parameters over the same memory, which {--update} sharded "
                    "does not support: register one Parameter in both places, or use {--update} "
                    "replicated.",
                    one,
                    other,
                )
            )


def _shard_of(name: str, value: Any, fragment: _Fragment) -> Any:
    """Return a fragment's values of one entry of its parameter's state."""
    if not isinstance(value, Tensor):
        return value
    if not _lies_with(name, value, fragment.parameter):
        return value.clone()
    return _flat_as(fragment.parameter, value)[fragment.start : fragment.stop].clone()


def _lies_with(name: str, value: Any, parameter: Tensor) -> bool:
    """Return whether a state has a value for each of its parameter's."""
    return isinstance(value, Tensor) and name not in SCALARS and value.shape == parameter.shape


def _flat(tensor: Tensor) -> Tensor:
    """View a tensor, or copy it, (numel,), in the order of `like`."""
    tensor = tensor.detach()
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    if tensor.is_contiguous() or not dense:
        return tensor.reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def _flat_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Copy a tensor, (numel,), in the order of its parameter."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    like(parameter, flat).copy_(tensor)
    return flat
