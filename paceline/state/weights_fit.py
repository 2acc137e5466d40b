"""Which of a file's weights go where in a model, and what doesn't fit.

    file    module.conv1.weight   module.fc.weight (1000, 512)        DDP put "module." in front
    model          conv1.weight          fc.weight (10, 512)          10 labels: fc stays new

Only the model's last layer, and only its number of outputs, may differ: a network for other labels
begins with what was learned. Anything else that differs means another model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

_COUNTED_ANEW = "num_batches_tracked"  # of BatchNorm, which old files lack
_ANYTHING = "_extra_state"  # a module's own, of any kind
_NAMED = 3  # of many names


def fit(
    state: Mapping[str, Any], model: nn.Module
) -> tuple[Mapping[str, Any], list[str], list[str]]:
    """Compare a file's weights, by name, with a model.

    Returns:
        What to load, by the model's names; what is left out, in sentences; and what makes it
        another model's, in parts of a sentence, none if it fits.
    """
    there, wanted = _without_wrappers(state), _without_wrappers(model.state_dict(keep_vars=True))
    common = [name for name in wanted if name in there]
    pairs = {name: (there[name][1], wanted[name][1]) for name in common}
    wrong = {name: text for name in common if (text := _wrong(name, *pairs[name]))}
    head = _changed_head(list(wanted), {name: pairs[name] for name in wrong})
    parts = (
        _some("missing ", _missing(there, wanted)),
        _some("unknown ", [name for name in there if name not in wanted]),
        _some("", [] if head else list(wrong.values())),
    )
    weights = {wanted[name][0]: there[name][1] for name in common if name not in wrong}
    notes = [f"the last layer's {wrong[name]}: it keeps its initial values." for name in head]
    return weights, notes, [part for part in parts if part]


def _without_wrappers(state: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return names and values by the names that the bare model would have."""
    bare = {name: ".".join(p for p in name.split(".") if p != "_orig_mod") for name in state}
    while bare and all(name.startswith("module.") for name in bare.values()):
        bare = {name: short.removeprefix("module.") for name, short in bare.items()}
    return {bare[name]: (name, value) for name, value in state.items()}


def _missing(
    there: Mapping[str, tuple[str, Any]], wanted: Mapping[str, tuple[str, Any]]
) -> list[str]:
    """List what the file lacks; a tied weight is there if one of its names is."""
    known = {id(value) for name, (_, value) in wanted.items() if name in there}
    return [
        name
        for name, (_, value) in wanted.items()
        if id(value) not in known and not name.endswith(_COUNTED_ANEW)
    ]


def _wrong(name: str, value: Any, wanted: Any) -> str:
    """Say what keeps a value from a place in the model, or nothing."""
    if name.endswith(_ANYTHING):
        return ""
    if not isinstance(value, Tensor):
        return f"{name} is not a tensor but {type(value).__name__}"
    if value.shape != wanted.shape:
        return f"{name} is {_shape(value)} but should be {_shape(wanted)}"
    if wanted.is_floating_point() and not value.is_floating_point():
        return f"{name} is {value.dtype} but should be {wanted.dtype}".replace("torch.", "")
    return ""


def _changed_head(names: Sequence[str], wrong: Mapping[str, tuple[Any, Any]]) -> tuple[str, ...]:
    """Name the tensors of the last layer, if they are wrong by their number of outputs alone."""
    last = names[-1].rpartition(".")[0] if names else ""
    changed = all(
        name.rpartition(".")[0] == last
        and isinstance(value, Tensor)
        and value.shape != wanted.shape
        and value.shape[1:] == wanted.shape[1:]
        and value.ndim == wanted.ndim
        for name, (value, wanted) in wrong.items()
    )
    return tuple(wrong) if changed and len(wrong) < len(names) else ()


def _shape(value: Tensor) -> str:
    return "×".join(map(str, value.shape)) or "a scalar"


def _some(what: str, names: Sequence[str]) -> str:
    """Name the first few and count them all, or say nothing of none."""
    if len(names) <= _NAMED:
        return what + ", ".join(names) if names else ""
    return f"{what}{', '.join(names[:_NAMED])}, … ({len(names):,})"
