"""Restores the state of a snapshot, or of a checkpoint file, into the same objects, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.replica.earlier_buffers import named_buffers
from paceline.replica.state_parts import (
    BUFFERS,
    EXTRA,
    GROUPS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    RANK,
    REQUIRES_GRAD,
    TRACKED,
    parts_of,
)
from paceline.snapshots.narrow import left_out
from paceline.snapshots.objects import StateObjects, with_extra_state
from paceline.state.state_copy import copy_state
from paceline.update.master_weights import is_narrow, narrow, widen
from paceline.update.state_entries import restore_entries
from paceline.update.state_watch import plain_state


def restore_state(
    state: Mapping[str, Mapping[Any, Any]], objects: StateObjects
) -> Mapping[Any, Any]:
    """Restore a snapshot in the same tensors; no replica may be bound to the model.

    The snapshot stays as it is, and may be restored again. Random streams aren't restored: each
    step derives its own.

    Args:
        state: the parts of a held snapshot.
        objects: the objects whose state it is.

    Returns:
        this rank's part of the divided state, for `Replica.enter_generation`; of several pairs,
        the parts by the pair's index, as text.

    Raises:
        ConfigError: model and optimizer have other parameters than in the snapshot.
    """
    own = {str(i): _restore_pair(parts_of(state, i), pair) for i, pair in enumerate(objects.pairs)}
    return own if objects.others else own["0"]


def restore_checkpoint(entries: Mapping[str, Any], objects: StateObjects) -> None:
    """Restore what `checkpoint_entries` returned; no replica is bound to the models.

    Objects that weren't tracked when the file was written stay as they are.

    Args:
        entries: of the file, which stay as they are.
        objects: the objects whose state it is.

    Raises:
        KeyError, RuntimeError, TypeError, ValueError: the state is another model's or optimizer's.
    """
    for pair in objects.pairs:
        model, optimizer = pair.entries
        dtype = widen(pair.trained().names, pair.optimizer)  # the file is in float32
        if pair.scope.first:
            pair.model.load_state_dict(entries[model])
        pair.optimizer.load_state_dict(entries[optimizer])
        if dtype is not None:
            narrow(pair.trained().names, pair.optimizer, dtype)
        for p in pair.trained().names:
            p.grad = None
    tracked = entries[objects.tracked_entry] if objects.tracked_entry else entries
    for name, one in objects.tracked.items():
        if name in tracked:
            one.load_state_dict(copy_state(tracked[name]))
        if isinstance(one, GradScaler) and one.is_enabled():
            reset_stages(one)


@torch.no_grad()
def _restore_pair(
    state: Mapping[str, Mapping[Any, Any]], objects: StateObjects
) -> Mapping[Any, Any]:
    """Restore a pair of a model and an optimizer; as `restore_state`."""
    model = objects.model
    optimizer = objects.optimizer
    names = objects.trained().names
    parameters = {name: p for p, name in names.items()}
    _refuse_others(parameters, state)
    for name, tracked in objects.all_tracked.items():
        if name in state[TRACKED]:
            tracked.load_state_dict(copy_state(state[TRACKED][name]))
        if isinstance(tracked, GradScaler) and tracked.is_enabled():
            reset_stages(tracked)
    modules = dict(model.named_modules()) if objects.scope.first else {}
    _restore_buffers(modules, state[BUFFERS])
    for name, module in with_extra_state(modules):
        module.set_extra_state(copy_state(state[EXTRA][name]))
    for name, p in parameters.items():
        if name in state[PARAMETERS]:  # a narrow one follows from its masters
            p.copy_(state[PARAMETERS][name])
        p.requires_grad_(state[REQUIRES_GRAD][name])
        p.grad = None
    _restore_optimizer(optimizer, parameters, state)
    return state[RANK]


def _refuse_others(
    parameters: Mapping[str, nn.Parameter], state: Mapping[str, Mapping[Any, Any]]
) -> None:
    """Require the parameters of a snapshot."""
    narrow = left_out(state)
    saved = state[PARAMETERS]
    for name in parameters.keys() | saved.keys() | narrow:
        own = parameters.get(name)
        copy = own if name in narrow and own is not None and is_narrow(own) else saved.get(name)
        if own is None or copy is None or (own.shape, own.dtype) != (copy.shape, copy.dtype):
            raise ConfigError(
                f"{name} was added, removed or converted since the snapshot was taken, so the "
                "snapshot doesn't fit the model: resume the run from a checkpoint."
            )


def _restore_buffers(modules: Mapping[str, nn.Module], saved: Mapping[str, Tensor | None]) -> None:
    for name, module, key in list(named_buffers(modules)):
        if name not in saved:
            delattr(module, key)
    for name, value in saved.items():
        prefix, _, key = name.rpartition(".")
        buffers = modules[prefix]._buffers
        own = buffers.get(key)
        if own is None or value is None or (own.shape, own.dtype) != (value.shape, value.dtype):
            near = next(modules[""].parameters(), torch.empty(0)) if own is None else own
            buffers[key] = None if value is None else value.to(near.device, copy=True)
        else:
            own.copy_(value)


def _restore_optimizer(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Mapping[Any, Any]],
) -> None:
    groups = optimizer.param_groups
    states = plain_state(optimizer)
    del groups[len(state[GROUPS]) :]
    group_of: dict[str, Mapping[str, Any]] = {}
    for group, saved in zip(groups, state[GROUPS].values(), strict=True):
        own = group.pop("params")
        own[:] = [parameters[name] for name in saved["params"]]
        options = {name: value for name, value in saved.items() if name != "params"}
        restore_entries(group, options, next(iter(own), torch.empty(0)), options)
        group["params"] = own
        group_of |= dict.fromkeys(saved["params"], group)
    for name, p in parameters.items():
        if name in state[OPTIMIZER]:
            entries = states.setdefault(p, {})
            restore_entries(entries, state[OPTIMIZER][name], p, group_of.get(name, {}))
        else:
            states.pop(p, None)
    for key in [key for key in states if not isinstance(key, Tensor) and key not in state[OTHER]]:
        del states[key]
    states.update(copy_state(state[OTHER]))


def reset_stages(scaler: GradScaler) -> None:
    """Forget what a loss scaler has done in an interrupted step, as its `update` does."""
    scaler._per_optimizer_states.clear()
