"""Objects whose state a snapshot has: a model, its optimizer, and what else is tracked.

For each entry of a model's state dict, a snapshot has the name of what it is of:

    entry                 name
    encoder.weight        encoder.weight       a parameter
    decoder.weight        encoder.weight       the same one: tied
    norm.running_mean     norm.running_mean    a buffer
    head._extra_state     head                 a module's further state
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer

from paceline.replica.state_parts import OWN_OPTIMIZER
from paceline.replica.trained_parameters import WHOLE, Scope, TrainedParameters
from paceline.state.stateful import Restorable, Stateful


class EntryNames:
    """Cache of a model's entry names, found anew where it has other parameters or buffers."""

    def __init__(self) -> None:
        self._names: Mapping[nn.Parameter, str] = {}
        self._buffers: frozenset[str] = frozenset()
        self._entries: dict[str, str] = {}

    def of(
        self, model: nn.Module, names: Mapping[nn.Parameter, str], buffers: Collection[str]
    ) -> dict[str, str]:
        """Return the names, by entry; they are found anew where parameters or buffers are others.

        Args:
            buffers: its buffers' names.
        """
        if names is not self._names or self._buffers != buffers:
            self._names = names
            self._buffers = frozenset(buffers)
            self._entries = entry_names(model, names)
        return self._entries


@dataclass(frozen=True, kw_only=True)
class StateObjects:
    """Objects whose state a snapshot has.

    Attributes:
        tracked: further objects (schedulers, loss scalers, …), by name.
        saved: objects whose state only checkpoint files need, by name.
        tracked_entry: the entry of a checkpoint file that has the tracked objects' states; "": each
            has an entry of its own.
        entry_names: the names of the model's entries.
        scope: what the pair has of the model, where several optimizers train it.
        entries: of a checkpoint file, for the model's and the optimizer's state dict.
        others: the further models and optimizers, each a pair.
        local_buffers: whether buffers that the model computes are each rank's own.
    """

    model: nn.Module
    optimizer: Optimizer
    tracked: Mapping[str, Restorable] = field(default_factory=dict)
    saved: Mapping[str, Stateful] = field(default_factory=dict)
    tracked_entry: str = ""
    entry_names: EntryNames = field(default_factory=EntryNames)
    scope: Scope = WHOLE
    entries: tuple[str, str] = ("model", "optimizer")
    others: Sequence[StateObjects] = ()
    local_buffers: bool = False

    @property
    def pairs(self) -> Sequence[StateObjects]:
        """All pairs of a model and an optimizer, this one first."""
        return (self, *self.others)

    def trained(self) -> TrainedParameters:
        """List the present parameters."""
        return TrainedParameters.of(self.model, self.optimizer, self.scope)

    def entries_of(
        self, names: Mapping[nn.Parameter, str], buffers: Collection[str]
    ) -> dict[str, str]:
        """Return the names of the values in the model's state dict, by entry; as `EntryNames.of`.

        Args:
            names: the names of the pair's parameters.
            buffers: its buffers' names.
        """
        if not self.scope.first:
            return {}
        if self.scope.others:
            names = {p: name for name, p in self.model.named_parameters()}
        return self.entry_names.of(self.model, names, buffers)

    @property
    def all_tracked(self) -> Mapping[str, Restorable]:
        """The tracked objects, and the optimizer if its class has a state dict of its own."""
        kind = type(self.optimizer)
        plain = kind.state_dict is Optimizer.state_dict
        return self.tracked if plain else {**self.tracked, OWN_OPTIMIZER: self.optimizer}


def with_extra_state(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have state besides parameters and buffers."""
    plain = nn.Module.get_extra_state
    for name, module in modules.items():
        if type(module).get_extra_state is not plain:
            yield name, module


def entry_names(model: nn.Module, names: Mapping[nn.Parameter, str]) -> dict[str, str]:
    """Return the names of a state dict's values, by entry and in the order of `state_dict()`.

    Args:
        model: the model; an entry of a parameter that has no name is left out.
    """
    first: dict[nn.Module, str] = {}  # a module's buffers are named by its first path
    entries: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        home = first.setdefault(module, path)
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter in names:
                entries[prefix + key] = names[parameter]
        for key in module._buffers:
            if key not in module._non_persistent_buffers_set:
                entries[prefix + key] = f"{home}.{key}" if home else key
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            entries[f"{prefix}_extra_state"] = home
    return entries
