"""Checkpoints, made of a snapshot: state dicts of model and optimizer, and the run's position.

    snapshot: parameters, buffers, … by name  ──▶  model.state_dict(), optimizer.state_dict(), …

Nothing is copied. The names of the model's entries (`EntryNames`) are in the snapshot, so that a
file can be made of it in any thread. Where a model or optimizer makes its state dict in another way
than torch's base class does, it isn't `is_plain`: then the state dict itself must be copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.lineage import as_values
from paceline.reduce.rank_state import OPTIMIZER as WHOLE_OPTIMIZER
from paceline.replica.state_parts import (
    BUFFERS,
    ENTRIES,
    EXTRA,
    GROUPS,
    OPTIMIZER,
    OTHER,
    OWN_OPTIMIZER,
    PARAMETERS,
    POSITION,
    SAVED,
    TRACKED,
    parts_of,
)
from paceline.snapshots.narrow import left_out
from paceline.snapshots.objects import StateObjects, entry_names
from paceline.snapshots.store import Borrowed
from paceline.state.checkpoint_files import exchange_entry
from paceline.state.checkpoint_writer import Checkpoint
from paceline.state.state_copy import copy_state
from paceline.update.master_weights import with_masters

_Parts = Mapping[str, Mapping[Any, Any]]


def is_plain(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether their state dicts are what torch's base classes make of their state."""
    modules = [
        type(module).state_dict is nn.Module.state_dict
        and type(module)._save_to_state_dict is nn.Module._save_to_state_dict
        and "state_dict" not in vars(module)
        and not any(_foreign(module._state_dict_pre_hooks, module._state_dict_hooks))
        for module in model.modules()
    ]
    before = optimizer._optimizer_state_dict_pre_hooks
    after = optimizer._optimizer_state_dict_post_hooks
    return all(modules) and "state_dict" not in vars(optimizer) and not any(_foreign(before, after))


def all_plain(objects: StateObjects) -> bool:
    """Return whether the state dicts of all pairs can be made of snapshots."""
    return all(is_plain(pair.model, pair.optimizer) for pair in objects.pairs)


def fits(state: _Parts, objects: StateObjects, bound: Sequence[Mapping[nn.Parameter, str]]) -> bool:
    """Return whether a snapshot has all entries that the models' plain state dicts have now.

    Args:
        state: the snapshot's parts.
        objects: the objects whose state it is.
        bound: each pair's names of the parameters, as they were when it was bound.
    """
    names = [pair.trained().names for pair in objects.pairs]
    if names != bound:  # a module was added or replaced since
        return False
    return all(
        _entries_now(pair, own) == parts_of(state, number)[ENTRIES]
        for number, (pair, own) in enumerate(zip(objects.pairs, names, strict=True))
    )


def _entries_now(pair: StateObjects, names: Mapping[nn.Parameter, str]) -> dict[str, str]:
    if not pair.scope.first:
        return {}
    if pair.scope.others:
        names = {p: name for name, p in pair.model.named_parameters()}
    return entry_names(pair.model, names)


def make_checkpoint(
    snapshot: Borrowed,
    objects: StateObjects,
    generation: Generation,
    sums: Mapping[int, list[float]],
    gathered: Mapping[str, Any] | None = None,
    *,
    plain: bool = True,
    best: bool = False,
) -> Checkpoint:
    """Make a checkpoint of a snapshot.

    Args:
        objects: the objects whose state it is.
        generation: the present one, whose number and lineage the checkpoint has.
        sums: over all ranks and the epoch's steps up to a step, by that step. A snapshot's position
            lacks those of steps whose summaries came later.
        gathered: what the ranks have besides model and optimizer, before the same step.
        plain: its state dicts can be made of it; otherwise they are copied from the objects.
        best: it is the best so far.
    """
    state = snapshot.state
    of_pairs = [gathered or {}]
    if objects.others:
        of_pairs = [(gathered or {}).get(str(pair)) or {} for pair in range(len(objects.pairs))]
    position = dict(state[POSITION])
    del position["members"]
    if sent := position.pop("sent"):  # by this rank alone
        position["sums"] = sums[max(sent)]
    position["generation"] = generation.number
    entries = checkpoint_entries(state, objects, of_pairs)
    for number, (pair, own) in enumerate(zip(objects.pairs, of_pairs, strict=True)):
        model, optimizer = pair.entries
        if not plain and pair.scope.first:
            entries[model] = with_metadata(copy_state(pair.model.state_dict()), pair.model)
        _use_masters(entries, pair, parts_of(state, number))
        if not plain and WHOLE_OPTIMIZER not in own:
            entries[optimizer] = copy_state(pair.optimizer.state_dict())
        if exchange := {key: value for key, value in own.items() if key != WHOLE_OPTIMIZER}:
            entries[exchange_entry(number)] = exchange
    narrow = left_out(state)
    keys = {key: name for key, name in state[ENTRIES].items() if name in narrow}
    masters = {name: entries[objects.entries[0]][key] for key, name in keys.items()}
    return Checkpoint(
        name=snapshot.name,
        step=position["number"],
        state={**entries, "position": position, "lineage": as_values(generation.lineage)},
        parameters={**snapshot_parameters(state, objects), **masters},
        best=best,
    )


def with_metadata(entries: Mapping[str, Any], model: nn.Module) -> OrderedDict[str, Any]:
    """Return a model's state dict with the versions of its modules, as `state_dict()` has them."""
    dated = OrderedDict(entries)
    versions = model.named_modules(remove_duplicate=False)
    dated._metadata = {name: {"version": module._version} for name, module in versions}  # type: ignore[attr-defined]
    return dated


def model_entries(state: _Parts, further: _Parts | None = None) -> dict[str, Any]:
    """Return what `model.state_dict()` was when the snapshot was taken, without its metadata.

    Args:
        state: the snapshot's parts.
        further: the parameters that the snapshot has with the model's other optimizers.
    """
    buffers = {name: value for name, value in state[BUFFERS].items() if value is not None}
    values = {**state[EXTRA], **buffers, **state[PARAMETERS], **(further or {})}
    return {key: values[name] for key, name in state[ENTRIES].items() if name in values}


def optimizer_entries(state: _Parts, whole: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what `optimizer.state_dict()` was when the snapshot was taken.

    Args:
        state: the snapshot's parts.
        whole: the whole optimizer's state dict, where ranks hold shards of its state.
    """
    if OWN_OPTIMIZER in state[TRACKED]:
        own: dict[str, Any] = state[TRACKED][OWN_OPTIMIZER]
        return own
    if whole is not None:
        return dict(whole)
    numbers: dict[str, int] = {}
    groups = []
    for group in state[GROUPS].values():
        names = group["params"]
        start = len(numbers)
        numbers |= {name: start + index for index, name in enumerate(names)}
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": [numbers[name] for name in names]})
    entries = {
        numbers[name]: state[OPTIMIZER][name] for name in numbers if name in state[OPTIMIZER]
    }
    return {"state": {**entries, **state[OTHER]}, "param_groups": groups}


def checkpoint_entries(
    state: _Parts, objects: StateObjects, gathered: Sequence[Mapping[str, Any]] = ({},)
) -> dict[str, Any]:
    """Return the entries of a checkpoint file, by name.

    Args:
        state: the snapshot's parts.
        objects: the objects whose state it is.
        gathered: for each pair, all ranks' own state before the same step.
    """
    tracked = {name: one for name, one in state[TRACKED].items() if name != OWN_OPTIMIZER}
    entries: dict[str, Any] = {}
    for number, pair in enumerate(objects.pairs):
        own = parts_of(state, number)
        (model, optimizer) = pair.entries
        if pair.scope.first:
            further = _of_other_optimizers(state, objects, pair.model)
            entries[model] = with_metadata(model_entries(own, further), pair.model)
        entries[optimizer] = optimizer_entries(own, gathered[number].get(WHOLE_OPTIMIZER))
    return {
        **entries,
        **({objects.tracked_entry: tracked} if objects.tracked_entry else tracked),
        **state[SAVED],
    }


def _use_masters(entries: dict[str, Any], pair: StateObjects, own: _Parts) -> None:
    """Give the model its float32 masters, which were gathered with the optimizer's state."""
    model, optimizer = pair.entries
    names = [name for group in own[GROUPS].values() for name in group["params"]]
    keys: dict[str, list[str]] = {}
    for key, name in own[ENTRIES].items():
        keys.setdefault(name, []).append(key)
    numbers = {number: keys[name] for number, name in enumerate(names) if name in keys}
    entries[optimizer] = with_masters(entries[model], entries[optimizer], numbers)
    for key in own[ENTRIES]:  # of which a snapshot has no narrow parameters
        if key in entries[model]:
            entries[model].move_to_end(key)


def snapshot_parameters(state: _Parts, objects: StateObjects) -> dict[str, Any]:
    """Return the parameters of a snapshot, by the entry of their optimizer's pair and by name."""
    if not objects.others:
        return dict(state[PARAMETERS])
    return {
        f"{pair.entries[0]}.{name}": value
        for number, pair in enumerate(objects.pairs)
        for name, value in parts_of(state, number)[PARAMETERS].items()
    }


def _of_other_optimizers(state: _Parts, objects: StateObjects, model: nn.Module) -> dict[str, Any]:
    """Return the parameters of a model that further optimizers train, by name."""
    return {
        name: value
        for number, pair in enumerate(objects.pairs)
        if pair.model is model and not pair.scope.first
        for name, value in parts_of(state, number)[PARAMETERS].items()
    }


def _foreign(*hooks: Mapping[int, Any]) -> Iterator[bool]:
    """Yield for each hook whether it isn't ours; ours settle, and change no state dict."""
    for each in hooks:
        yield from (not str(hook.__module__).startswith("paceline.") for hook in each.values())
