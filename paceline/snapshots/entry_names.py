"""Entry names: for each entry of a state dict, the parameter, buffer or module that it is of.

entry                 name
encoder.weight        encoder.weight       a parameter
decoder.weight        encoder.weight       the same one: tied
norm.running_mean     norm.running_mean    a buffer
head._extra_state     head                 a module's further state
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn


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
            model: the model.
            names: its parameters' names.
            buffers: its buffers' names.
        """
        if names is not self._names or self._buffers != buffers:
            self._names = names
            self._buffers = frozenset(buffers)
            self._entries = entry_names(model, names)
        return self._entries


def entry_names(model: nn.Module, names: Mapping[nn.Parameter, str]) -> dict[str, str]:
    """Return the names of a state dict's values, by entry and in the order of `state_dict()`.

    Args:
        model: the model; an entry of a parameter that has no name is left out.
        names: its parameters' names.
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
