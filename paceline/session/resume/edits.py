"""Hyperparameters that were edited between two starts of a run: the edited ones win, with a note.

    the checkpoint's start was given    lr 0.1    momentum 0.9
    this start is given                 lr 0.1    momentum 0.8
    restored                            lr 0.01   momentum 0.8      (a schedule changed the rate)

A checkpoint has present values, which schedules have changed, and in its entry `given` those that
its start was given. A value that differs between the two starts replaces the checkpoint's; all else
continues. A rate that a schedule changes keeps the schedule: it is multiplied as the given one was.

torch restores an optimizer's state by its parameters' places, and a schedule's whatever its class.
So the entry has the parameters' names, by which state follows a parameter to another place in its
group, and the schedules' classes.

Files of earlier versions have no such entry. There the parameter groups stand for it, with each
group's `initial_lr` as its rate.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from paceline.errors import ConfigError, Message
from paceline.replica.averaged_hooks import AVERAGE, WORKERS
from paceline.state.checkpoint_files import exchange_entry

GIVEN = "given"
"""The entry of a checkpoint."""

RESET = "reset_optimizer"
"""Its key: an earlier start of the run has begun the optimizers' state anew."""

# What schedules and loss scalers change themselves; the rates follow the optimizer's.
_PROGRESS = {
    *("base_lrs", "_last_lr", "last_epoch", "_step_count", "T_cur", "best", "num_bad_epochs"),
    *("cooldown_counter", "_growth_tracker", "_is_initial", "_get_lr_called_within_step"),
    *("verbose", "optimizer"),
}
_CHANGED_LATER = {"T_i", "scale"}  # given at first, so that only the entry `given` has them
_NAMES = frozenset({"params", "param_names"})
# State that an option adds, and that the other state of a parameter lacks where it was off.
_STATE_OF = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
_ADDED_BY_TORCH = "differentiable"  # to the defaults of any optimizer, when its state is restored
_LONGEST = 80  # characters of a value in a sentence


@dataclass(kw_only=True, eq=False)
class GivenHyperparameters:
    """Registry of the hyperparameters that this start is given, before any schedule changes them.

    Attributes:
        reset_optimizer: optimizers begin their state anew, whatever class the checkpoint's have.
        tracked_entry: the checkpoint's entry for tracked objects; "": each has its own.
        entries: plain values: the entry `given` of this start's checkpoints.
    """

    reset_optimizer: bool = False
    tracked_entry: str = ""
    entries: dict[str, Any] = field(default_factory=dict)
    _optimizers: dict[str, Optimizer] = field(default_factory=dict)
    _objects: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.entries |= {"optimizers": {}, "objects": {}, "kinds": {}, RESET: self.reset_optimizer}

    def add_optimizer(self, entry: str, optimizer: Optimizer, model: nn.Module) -> None:
        """Note an optimizer as the user made it: before anything is restored in it.

        Args:
            entry: its entry in checkpoints.
            model: has the names of its parameters.
        """
        self._optimizers[entry] = optimizer
        groups = optimizer.param_groups
        types = {str(p.dtype).removeprefix("torch.") for group in groups for p in group["params"]}
        self.entries["optimizers"][entry] = {
            "class": type(optimizer).__name__,
            "groups": [_given_options(group) for group in groups],
            "names": parameter_names(model, [optimizer]),
            "dtypes": sorted(types),
        }

    def add_object(self, name: str, tracked: Any) -> None:
        """Note a tracked object as the user made it: before anything is restored in it."""
        self._objects[name] = tracked
        self.entries["objects"][name] = _plain(tracked.state_dict(), _PROGRESS)
        self.entries["kinds"][name] = _kind(tracked)
        entry = self._entry_of(tracked)
        if not isinstance(tracked, LRScheduler) or entry is None:
            return
        known = self.entries["optimizers"][entry]["groups"]
        for given, group in zip(known, self._optimizers[entry].param_groups, strict=True):
            # Some schedules keep their arguments in the groups.
            added = _given_options(group)
            given |= {key: value for key, value in added.items() if key not in given}
        for one in _schedules(tracked):
            if isinstance(one, OneCycleLR | CyclicLR):  # their arguments are the rates
                for given, rate in zip(known, one.base_lrs, strict=True):
                    given["lr"] = _plain(rate)

    def edited(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's entries with the edited values; tensors aren't copied.

        Raises:
            ConfigError: an optimizer or a schedule is of another class than the checkpoint's, or an
                optimizer has other parameters in its groups.
        """
        result = dict(state)
        for entry in self._optimizers:
            if entry in state:
                result[entry] = self._edited_optimizer(entry, state[entry], state)
        first = next(iter(self._optimizers), "")
        averaged = state.get(exchange_entry(0), {}).get(AVERAGE)
        if averaged is not None and first in state:
            workers = [
                {**own, "optimizer": self._edited_optimizer(first, own["optimizer"], state)}
                for own in averaged[WORKERS]
            ]
            exchange = {**state[exchange_entry(0)], AVERAGE: {**averaged, WORKERS: workers}}
            result[exchange_entry(0)] = exchange
        objects = dict(state.get(self.tracked_entry, {})) if self.tracked_entry else result
        for name, tracked in self._objects.items():
            if name in objects and _follows_edits(tracked):
                self._require_kind(name, state)
                objects[name] = self._edited_object(name, tracked, state, objects[name])
        if self.tracked_entry in state:
            result[self.tracked_entry] = objects
        return result

    def notes(self, state: Mapping[str, Any]) -> list[str | Message]:
        """Return what a user must know of the difference between this start and a checkpoint's."""
        resets = self.resets(state)
        replaced: list[str] = []
        ignored: list[str] = []
        saved = state.get(GIVEN)
        for entry, own in self.entries["optimizers"].items():
            of = "" if len(self._optimizers) == 1 else f"{entry}'s "
            known = self._known_groups(entry, state[entry], saved) if entry in state else []
            for pair in zip(known, own["groups"], strict=False) if not resets else ():
                replaced += [of + _replaced(*edit) for edit in _differences(*pair)]
            before = (saved or {}).get("optimizers", {}).get(entry, {}).get("dtypes", own["dtypes"])
            if before != own["dtypes"]:
                replaced.append(_replaced(f"{of}parameters' type", before, own["dtypes"]))
        objects = state.get(self.tracked_entry, {}) if self.tracked_entry else state
        for name, own in self.entries["objects"].items():
            if name not in objects:
                continue
            for key, before, now in _differences(self._known(name, objects[name], saved), own):
                if _follows_edits(self._objects[name]):
                    replaced.append(f"{name}'s {_replaced(key, before, now)}")
                else:
                    ignored.append(f"{name}'s {key} stays {_text(before)}, not {_text(now)}")
        texts: list[str | Message] = []
        if resets and state:
            texts.append(
                Message("the optimizer's state begins anew, because of {--reset_optimizer}.")
            )
        if replaced:
            texts.append(f"{', '.join(dict.fromkeys(replaced))}.")
        if ignored:
            texts.append(f"The state of tracked objects is the checkpoint's: {', '.join(ignored)}.")
        return texts

    def resets(self, checkpoint: Mapping[str, Any]) -> bool:
        """Return whether optimizers begin anew: once in a run, though each start has the flag."""
        return self.reset_optimizer and not checkpoint.get(GIVEN, {}).get(RESET, False)

    def _edited_optimizer(
        self, entry: str, state: Mapping[str, Any], checkpoint: Mapping[str, Any]
    ) -> dict[str, Any]:
        own = self.entries["optimizers"][entry]
        saved = checkpoint.get(GIVEN)
        kind = None if saved is None else saved["optimizers"].get(entry, {}).get("class")
        optimizer = self._optimizers[entry]
        groups = state["param_groups"]
        if self.resets(checkpoint):
            return _reset(optimizer, own["groups"], groups)
        if kind is not None and kind != own["class"]:
            raise ConfigError(
                Message(
                    "the checkpoint was written with the optimizer {0}, but this start has {1}: "
                    "give {0}, or begin the optimizer's state anew with {--reset_optimizer}, which "
                    "keeps the weights.",
                    kind,
                    own["class"],
                )
            )
        if saved is not None:
            state = _in_own_order(state, saved["optimizers"].get(entry, {}), own["names"])
            groups = state["param_groups"]
        known = self._known_groups(entry, state, saved)
        if len(groups) != len(own["groups"]) or len(known) != len(groups):
            return dict(state)  # which torch refuses
        edited = []
        for group, live, before, now in zip(
            groups, optimizer.param_groups, known, own["groups"], strict=True
        ):
            edited.append(_edited_group(group, live, before, now))
        values = _completed(state["state"], edited)
        return {**state, "state": values, "param_groups": edited}

    def _edited_object(
        self, name: str, tracked: Any, state: Mapping[str, Any], own: Mapping[str, Any]
    ) -> Any:
        saved = state.get(GIVEN)
        merged = _merged(self._known(name, own, saved), self.entries["objects"][name], own)
        entry = self._entry_of(tracked)
        if entry is None or entry not in state:
            return merged
        known = self._known_groups(entry, state[entry], saved)
        groups = self.entries["optimizers"][entry]["groups"]
        rates = [
            (before.get("lr"), now.get("lr")) for before, now in zip(known, groups, strict=False)
        ]
        return _with_rates(merged, rates)

    def _require_kind(self, name: str, state: Mapping[str, Any]) -> None:
        """Require that a schedule or loss scaler is of the checkpoint's class."""
        now = self.entries["kinds"][name]
        before = state.get(GIVEN, {}).get("kinds", {}).get(name, now)
        if before != now:
            raise ConfigError(
                f"the checkpoint has the state of a {before} as {name}, but this start tracks a "
                f"{now} by that name: track a {before}, or begin another run from the model's "
                "weights."
            )

    def _entry_of(self, tracked: Any) -> str | None:
        """Return the entry of the optimizer that a schedule changes."""
        optimizer = getattr(tracked, "optimizer", None)
        return next((key for key, one in self._optimizers.items() if one is optimizer), None)

    def _known(self, name: str, state: Any, saved: Mapping[str, Any] | None) -> Any:
        """Return what a checkpoint's start was given for an object."""
        if saved is None:
            follows = _follows_edits(self._objects[name])
            return _plain(state, _PROGRESS | _CHANGED_LATER) if follows else {}
        return saved["objects"].get(name, {})

    def _known_groups(
        self, entry: str, state: Mapping[str, Any], saved: Mapping[str, Any] | None
    ) -> list[Mapping[str, Any]]:
        """Return what a checkpoint's start was given for an optimizer's groups."""
        if saved is not None:
            known: list[Mapping[str, Any]] = saved["optimizers"].get(entry, {}).get("groups", [])
            return known
        # Other optimizers change values in their groups, as do schedules that cycle momentum.
        plain = type(self._optimizers[entry]).__module__.startswith("torch.optim.")
        groups: list[Mapping[str, Any]] = [
            _given_options(group) if plain and "max_momentum" not in group else {}
            for group in state["param_groups"]
        ]
        return groups


def parameter_names(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[list[str]]:
    """Return the names of each parameter group's parameters; those of other modules by number."""
    own = {p: name.replace("_orig_mod.", "") for name, p in model.named_parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    names = []
    for group in groups:
        foreign = (f"parameter {number} of another module" for number in count())
        names.append([own[p] if p in own else next(foreign) for p in group["params"]])
    return names


def require_options(name: str, optimizer: Optimizer) -> None:
    """Require all options in an optimizer that a checkpoint has been restored in.

    Raises:
        ConfigError: one is missing: the checkpoint is of another class.
    """
    for group in optimizer.param_groups:
        for option in optimizer.defaults:
            if option not in group and option != _ADDED_BY_TORCH:
                raise ConfigError(
                    Message(
                        "the checkpoint's {} has no {}, which {} needs: it was written with an "
                        "optimizer of another class. Give that one, or begin the optimizer's state "
                        "anew with {--reset_optimizer}.",
                        name,
                        option,
                        type(optimizer).__name__,
                    )
                )


def edited_flags(saved: Mapping[str, Any], flags: Mapping[str, Any]) -> list[str]:
    """Return which flags replace those that a checkpoint was written with, and their values."""
    return [
        _replaced(f"--{name}", saved[name], value)
        for name, value in flags.items()
        if name in saved and _plain(saved[name]) != _plain(value)
    ]


def _reset(
    optimizer: Optimizer, given: list[dict[str, Any]], saved: list[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the state dict of an optimizer that begins anew, its rate where the schedule is."""
    present = optimizer.state_dict()["param_groups"]
    groups = []
    for index, (group, live, now) in enumerate(
        zip(present, optimizer.param_groups, given, strict=True)
    ):
        fresh = {**group, **{key: _like(live.get(key), value) for key, value in now.items()}}
        fresh.pop("initial_lr", None)
        before = saved[index] if len(saved) == len(given) else {}
        if "initial_lr" in before and "lr" in now:
            fresh["initial_lr"] = now["lr"]
            rate = _scaled(_plain(before["lr"]), _plain(before["initial_lr"]), now["lr"])
            fresh["lr"] = _like(live["lr"], rate)
        groups.append(fresh)
    return {"state": {}, "param_groups": groups}


def _in_own_order(
    state: Mapping[str, Any], saved: Mapping[str, Any], own: list[list[str]]
) -> Mapping[str, Any]:
    """Return an optimizer's state dict with each group's parameters in this start's order.

    Raises:
        ConfigError: a group has other parameters than the checkpoint's.
    """
    before: list[list[str]] = saved.get("names", own)
    groups = state["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    if before == own or sizes != [len(names) for names in before]:  # added to after the start
        return state
    for number, (was, names) in enumerate(zip_longest(before, own, fillvalue=())):
        differing = sorted(set(was) ^ set(names))
        if differing:
            owners = ("the checkpoint's", "this start's")
            there, lacking = owners if differing[0] in was else reversed(owners)
            raise ConfigError(
                Message(
                    "{} is in group {} of {} optimizer, but not of {}: give the optimizer the same "
                    "parameters in the same groups, or begin its state anew with "
                    "{--reset_optimizer}, which keeps the weights.",
                    differing[0],
                    number,
                    there,
                    lacking,
                )
            )
    moved = []
    for group, was, names in zip(groups, before, own, strict=True):
        numbers = dict(zip(was, group["params"], strict=True))
        moved.append({**group, "params": [numbers[name] for name in names]})
    return {**state, "param_groups": moved}


def _edited_group(
    group: Mapping[str, Any],
    live: Mapping[str, Any],
    before: Mapping[str, Any],
    now: Mapping[str, Any],
) -> dict[str, Any]:
    edited = dict(group)
    for key, value in now.items():
        if key not in before or before[key] == value:
            continue
        if key == "lr" and "initial_lr" in group:
            edited["initial_lr"] = _scaled(_plain(group["initial_lr"]), before[key], value)
            rate = _scaled(_plain(group[key]), before[key], value)
            edited[key] = _like(live[key], rate)
        else:
            edited[key] = _like(live.get(key), copy.deepcopy(value))
    return edited


def _completed(state: Mapping[Any, Any], groups: list[dict[str, Any]]) -> dict[Any, Any]:
    """Return parameters' states with what options add that were off before, beginning at zero."""
    completed = dict(state)
    for group in groups:
        needed = [name for option, name in _STATE_OF.items() if group.get(option)]
        for number in group["params"]:
            values = completed.get(number, {})
            averages = [v for k, v in values.items() if k.endswith("avg_sq") or k == "square_avg"]
            missing = [name for name in needed if name not in values]
            if averages and missing:
                zeros = {name: torch.zeros_like(averages[0]) for name in missing}
                completed[number] = {**values, **zeros}
    return completed


def _given_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's options, its rate as it was before schedules changed it."""
    options = {}
    for key, value in group.items():
        plain = _plain(value)
        if key not in _NAMES and key != "initial_lr" and plain is not _UNKNOWN:
            options[key] = plain
    if "initial_lr" in group:
        options["lr"] = _plain(group["initial_lr"])
    return options


class _Unknown:
    """The type of values that aren't compared: tensors, functions."""


_UNKNOWN = _Unknown()


def _plain(value: Any, leave_out: Set[str] = _NAMES) -> Any:
    """Return numbers, texts, and lists and mappings of them, as files have them."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else _UNKNOWN
    if isinstance(value, Mapping):
        pairs = ((key, _plain(one, leave_out)) for key, one in value.items())
        return {key: one for key, one in pairs if key not in leave_out and one is not _UNKNOWN}
    if isinstance(value, list | tuple):
        values = [_plain(one, leave_out) for one in value]
        return _UNKNOWN if any(one is _UNKNOWN for one in values) else values
    return value if isinstance(value, bool | int | float | str | None) else _UNKNOWN


def _merged(before: Any, now: Any, state: Any) -> Any:
    """Return a state with what differs between two given values, as deep as both have it."""
    if (
        all(isinstance(one, Mapping) for one in (before, now, state))
        and before.keys() == now.keys()
    ):
        changed = {k: _merged(before[k], v, state[k]) for k, v in now.items() if k in state}
        return {**state, **changed} if type(state) is dict else type(state)({**state, **changed})
    if all(isinstance(one, list) for one in (before, now, state)) and (
        len(before) == len(now) == len(state)
    ):
        return [_merged(*three) for three in zip(before, now, state, strict=True)]
    if before == now:
        return state
    if isinstance(state, Mapping) and isinstance(now, Mapping):
        return type(state)(now)  # type: ignore[call-arg]
    return tuple(now) if isinstance(state, tuple) else copy.deepcopy(now)


def _differences(before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each value that differs, and both values."""
    for key in now:
        if key not in before or before[key] == now[key]:
            continue
        inner = [one for one in (before[key], now[key]) if isinstance(one, Mapping)]
        if len(inner) == 2 and inner[0].keys() == inner[1].keys():
            yield from _differences(*inner)
            continue
        lists = [one for one in (before[key], now[key]) if isinstance(one, list)]
        if len(lists) == 2 and len(lists[0]) == len(lists[1]) and isinstance(now[key][0], Mapping):
            for pair in zip(*lists, strict=True):
                yield from _differences(*pair)
            continue
        yield key, before[key], now[key]


def _with_rates(state: Any, rates: list[tuple[Any, Any]]) -> Any:
    """Return a schedule's state, and those of schedules in it, with the edited base rates."""
    if isinstance(state, list):
        return [_with_rates(one, rates) for one in state]
    if not isinstance(state, dict):
        return state
    edited = {key: _with_rates(value, rates) for key, value in state.items()}
    for key in ("base_lrs", "_last_lr"):
        values = state.get(key)
        if isinstance(values, list) and len(values) == len(rates):
            edited[key] = [
                value if None in pair or pair[0] == pair[1] else _scaled(_plain(value), *pair)
                for value, pair in zip(values, rates, strict=True)
            ]
    return edited


def _schedules(schedule: Any) -> Iterator[Any]:
    yield schedule
    for one in getattr(schedule, "_schedulers", ()):
        yield from _schedules(one)


def _kind(tracked: Any) -> str:
    """Return an object's class, and those of the schedules in it."""
    inner = [_kind(one) for one in getattr(tracked, "_schedulers", ())]
    name = type(tracked).__name__
    return f"{name} of {', '.join(inner)}" if inner else name


def _follows_edits(tracked: Any) -> bool:
    """Return whether an object's class is known, so that its options can be found in its state."""
    return isinstance(tracked, LRScheduler | GradScaler)


def _scaled(value: float, before: float, now: float) -> float:
    """Return a rate multiplied by `now` / `before`."""
    return now if value == before or not before else value * (now / before)


def _like(live: Any, value: Any) -> Any:
    """Return a value as the optimizer has it: as a tensor, or a tuple."""
    if isinstance(live, Tensor):
        return torch.full_like(live, value)
    return tuple(value) if isinstance(live, tuple) else value


def _replaced(name: str, before: Any, now: Any) -> str:
    return f"{name} {_text(now)} replaces the checkpoint's {_text(before)}"


def _text(value: Any) -> str:
    """Write a value for a sentence."""
    if isinstance(value, Mapping):
        text = ", ".join(map(str, value))
    elif isinstance(value, list | tuple):
        text = ", ".join(map(_text, value))
    else:
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
