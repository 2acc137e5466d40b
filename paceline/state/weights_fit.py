"""Which of a file's weights go where in a model, and what doesn't fit.

    file    module.conv1.weight   module.fc.weight (1000, 512)        DDP put "module." in front
    model          conv1.weight          fc.weight (10, 512)          10 labels: fc stays new

Wrappers put their own name in front of all names ("module.", "model."), torch.compile puts
"_orig_mod." before some. What stands beside the wrapped model, a loss's weights, say, is left out.

Only the model's last layer, and only its number of outputs, may differ: a network for other labels
begins with what was learned. Anything else that differs means another model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor, nn

_COUNTED_ANEW = "num_batches_tracked"  # of BatchNorm, which old files lack
_ANYTHING = "_extra_state"  # a module's own, of any kind
_NAMED = 3  # of many names
_TRIED = 8  # of the model's names, to find what the file's have in front; a file may lack some


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Comparison of a file's weights with a model, by name.

    Attributes:
        weights: what to load, by the model's names.
        notes: what is left out or renamed, in sentences without their subject.
        differences: what makes it another model's, in parts of a sentence; none if it fits.
        known: number of the model's names that the file has.
        head: names of the last layer's tensors that keep their initial values.
    """

    weights: Mapping[str, Any]
    notes: list[str]
    differences: list[str]
    known: int
    head: tuple[str, ...] = ()


def fit(state: Mapping[str, Any], model: nn.Module) -> Fit:
    """Compare a file's weights, by name, with a model."""
    wanted = _without_wrappers(model.state_dict(keep_vars=True))
    there = _without_wrappers(state)
    prefixes = ("", *_prefixes(there, wanted))
    fits = {prefix: _compare(state, there, wanted, prefix) for prefix in prefixes}
    fitting = (one for one in fits.values() if not one.differences)
    common = (fits[prefix] for prefix in prefixes if all(n.startswith(prefix) for n in there))
    return next(fitting, None) or max(common, key=lambda one: one.known)


def _compare(
    state: Mapping[str, Any],
    there: Mapping[str, tuple[str, Any]],
    wanted: Mapping[str, tuple[str, Any]],
    prefix: str,
) -> Fit:
    """Compare those of a file's weights whose names begin with `prefix`, without it."""
    beside = [name for name in there if not name.startswith(prefix)]
    there = {
        name.removeprefix(prefix): pair for name, pair in there.items() if name.startswith(prefix)
    }
    common = [name for name in wanted if name in there]
    pairs = {name: (there[name][1], wanted[name][1]) for name in common}
    wrong = {name: text for name in common if (text := _wrong(name, *pairs[name]))}
    head = _changed_head(list(wanted), {name: pairs[name] for name in wrong})
    parts = (
        _some("missing ", _missing(there, wanted)),
        _some("unknown ", [name for name in there if name not in wanted]),
        _some("", [] if head else list(wrong.values())),
    )
    notes = [f"the last layer's {wrong[name]}: it keeps its initial values." for name in head]
    removed = _removed(state, prefix)
    if removed:
        notes.append(f"the names of its weights were read without {removed}.")
    if beside:
        notes.append(f"{_some('', beside)}: left out, for the others begin with {prefix}")
    return Fit(
        weights={wanted[name][0]: there[name][1] for name in common if name not in wrong},
        notes=notes,
        differences=[part for part in parts if part],
        known=len(common),
        head=head,
    )


def _without_wrappers(state: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return names and values by the names that the bare model would have."""
    bare = {name: ".".join(p for p in name.split(".") if p != "_orig_mod") for name in state}
    while bare and all(name.startswith("module.") for name in bare.values()):
        bare = {name: short.removeprefix("module.") for name, short in bare.items()}
    return {bare[name]: (name, value) for name, value in state.items()}


def _prefixes(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """List what stands before names of the model in most of a file's names, the shortest first."""
    found = {
        name.removesuffix(known)
        for known in islice(wanted, _TRIED)
        for name in there
        if name.endswith(f".{known}")
    }
    most = [p for p in found if 2 * sum(name.startswith(p) for name in there) > len(there)]
    return sorted(most, key=lambda prefix: (len(prefix), prefix))


def _removed(state: Mapping[str, Any], prefix: str) -> str:
    """Name the parts of a file's names that the model's don't have, quoted."""
    bare = [name.replace("_orig_mod.", "") for name in state]
    wrappers = ["module."] if all(name.startswith("module.") for name in bare) else []
    if bare != list(state):
        wrappers.append("_orig_mod.")
    return " and ".join(f'"{part}"' for part in (*wrappers, prefix) if part)


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
