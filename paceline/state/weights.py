"""Files of weights: plain `model.state_dict()`, written at once or not at all.

    torch.save of a state dict, or of a dict that has one as an entry, as checkpoints do
    safetensors, where its package is installed
    Caffe2's minidb of a model, and the index of a run's checkpoint in parts

    {"epoch": 3, "optimizer": …, "state_dict": {"module.conv1.weight": …}}      PyTorch's examples
    {"paceline": 1, "model": {"conv1.weight": …}, …}                            a run's checkpoint

What is read never runs code: a file that holds more than tensors and plain values is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.atomic_write import atomic_file, link_atomically
from paceline.errors import CheckpointError, ConfigError, many
from paceline.models.zoo import MODELS
from paceline.state.checkpoint_parts import INDEX_SUFFIX, read_parts
from paceline.state.file_integrity import check_header, check_integrity, load_file
from paceline.state.weights_fit import fit

_RUN = "paceline"  # an entry of a run's checkpoints
_DEEPEST = 2  # entries within entries
_AVERAGES = ("ema", "swa", "average", "shadow", "teacher")


def save_weights(path: Path, model: nn.Module, about: Mapping[str, Any] | None = None) -> None:
    """Write the model's state dict, contiguous; a reader sees the old file or the new one, whole.

    Args:
        path: the file.
        model: has the weights.
        about: the model's description, see `weights_about.py`.

    Raises:
        CheckpointError: the file can't be written (disk, permissions).
    """
    _save_state(path, model.state_dict(), about)


def described(given: Mapping[str, Any], about: Mapping[str, Any] | None) -> OrderedDict[str, Any]:
    """Return a state dict, contiguous, with a model's description, see `weights_about.py`."""
    state = OrderedDict(
        (name, value.contiguous() if isinstance(value, torch.Tensor) else value)
        for name, value in given.items()
    )
    vars(state).update(getattr(given, "__dict__", {}))  # torch's own: versions of modules
    if about is not None:
        vars(state).update(about=about)
    return state


def _save_state(path: Path, given: Mapping[str, Any], about: Mapping[str, Any] | None) -> None:
    state = described(given, about)
    try:
        with atomic_file(path) as file:
            torch.save(state, file)
    except OSError as error:
        raise _unwritten(path, error) from error


def save_epoch(
    folder: Path, name: str, state: Mapping[str, Any], about: Mapping[str, Any], *, best: bool
) -> None:
    """Write the weights after an epoch, and keep those of the best one beside them.

    Args:
        folder: the run's.
        name: of the files; see `weights_files`.
        state: the model's state dict.
        about: the model's description, see `weights_about.py`.
        best: the epoch is the best so far.

    Raises:
        CheckpointError: a file can't be written (disk, permissions).
    """
    last, best_file = weights_files(folder, name)
    _save_state(last, state, about)
    if best:
        try:
            link_atomically(last, best_file)  # writing the next epoch's makes a new file
        except OSError as error:
            raise _unwritten(best_file, error) from error


def weights_files(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the files of a run's weights: after the last epoch, and after the best one.

    Args:
        folder: the run's.
        name: of the first one, without its ending.
    """
    return folder / f"{name}.pt", folder / f"{name.removesuffix('_model')}_best.pt"


def load_weights(
    path: Path, model: nn.Module, *, flag: str = "weights", whole: bool = False
) -> tuple[str, ...]:
    """Copy a file's weights into the model, of the same names and shapes.

    A last layer for another number of labels stays as it is. Weights of another floating-point type
    are converted.

    Args:
        path: the file.
        model: receives them.
        flag: the option that gave the file.
        whole: refuse a last layer for another number of labels.

    Returns:
        what was left out, in sentences.

    Raises:
        ConfigError: there is no such file, its package isn't installed, or its weights are another
            model's; the model is as it was.
        CheckpointError: the file is damaged or holds something else, or a weight isn't a number.
    """
    check_weights(path, flag)
    if path.suffix == INDEX_SUFFIX:
        state = read_parts(path)
    else:
        check_integrity(path)
        state = load_file(path)
    return install_weights(state, model, source=str(path), flag=flag, whole=whole)


def install_weights(
    state: Any, model: nn.Module, *, source: str, flag: str = "weights", whole: bool = False
) -> tuple[str, ...]:
    """Copy weights into the model, as `load_weights`, given what a file or a package has.

    Args:
        state: a state dict, or nested dicts with one.
        model: receives them.
        source: what messages call them.
        flag: the option that gave them.
        whole: refuse a last layer for another number of labels.
    """
    fits = {name: fit(weights, model) for name, weights in _state_dicts(state).items()}
    if not fits:
        raise CheckpointError(
            f"{source}: contains no named weights; give a file of a model's state_dict()."
        )
    usable = sorted((name for name in fits if not fits[name].differences), key=_is_average)
    if not usable:
        name, nearest = max(fits.items(), key=lambda item: item[1].known)
        entry = f" (those in its entry {name})" if name else ""
        said = getattr(state, "about", {}).get("model")
        zoo = said or _zoo_model(_state_dicts(state)[name])
        remedy = f"Give --model {zoo}" if zoo else "Give the --model that they were trained with"
        raise ConfigError(
            f"--{flag} {source}: the weights{entry} belong to another model: "
            f"{'; '.join(nearest.differences)}. {remedy}."
        )
    name, *others = usable
    if whole and fits[name].head:
        wrong = fits[name].notes[0].rstrip(".").partition(":")[0]
        raise ConfigError(
            f"--{flag} {source}: {wrong}, as of a model for other labels: give weights of this "
            "run's labels."
        )
    _require_numbers(source, fits[name].weights, model)
    model.load_state_dict(fits[name].weights, strict=False)
    notes = fits[name].notes
    if name and _RUN not in state:
        notes = [f"its entry {name} has the weights.", *notes]
    if others:
        notes = [*notes, f"other weights of such a model were left out: {', '.join(others)}."]
    return tuple(f"{source}: {note}" for note in notes)


def _zoo_model(state: Mapping[str, Any]) -> str:
    """Return the name of the zoo's model that weights fit, but for the number of labels, or ""."""
    shapes = [value.shape for value in state.values() if isinstance(value, torch.Tensor)]
    channels = next((shape[1] for shape in shapes if len(shape) == 4), 0)
    for name, make in MODELS.items():
        with torch.device("meta"):
            model = make(num_labels=1, num_channels=channels or 1)
        if not fit(state, model).differences:
            return name
    return ""


def _state_dicts(state: Any, name: str = "", depth: int = 0) -> dict[str, Mapping[str, Any]]:
    """Find what could be a model's weights in a file, by the name of its entry, "" for the whole.

    Nested names are joined by dots.
    """
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        return {}
    if not name and _RUN in state and isinstance(state.get("model"), Mapping):
        return {"model": state["model"]}
    found = {}
    if any(isinstance(value, torch.Tensor) for value in state.values()):
        found[name] = state
    if depth < _DEEPEST:
        for key, value in state.items():
            found |= _state_dicts(value, f"{name}.{key}".lstrip("."), depth + 1)
    return found


def _require_numbers(source: str, weights: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse weights of which no loss could be computed; a mask among the buffers may have inf."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = {name: v for name, v in weights.items() if isinstance(v, torch.Tensor)}
    wrong = [
        name
        for name, value in tensors.items()
        if not (value.isfinite() if name in parameters else ~value.isnan()).all()
    ]
    if wrong:
        count = f" (and {many(len(wrong) - 1, 'more tensor')})" if len(wrong) > 1 else ""
        raise CheckpointError(
            f"{source}: {wrong[0]}{count} has values that are NaN or infinite, as of a training "
            "that diverged: give weights of an earlier epoch."
        )


def _is_average(name: str) -> bool:
    """Return whether an entry has an average of the weights of several steps, by its name."""
    return any(word in name.lower() for word in _AVERAGES)


def check_weights(path: Path, flag: str = "weights") -> None:
    """Look at the ends of a file, without reading it: is it there, of a known format, not torn.

    Raises:
        ConfigError: there is no such file, or its package isn't installed.
        CheckpointError: the file is torn or something else.
    """
    if not path.exists():
        raise ConfigError(f"--{flag} {path}: there is no such file; check the path.")
    if path.is_dir():
        inside = sorted(path.glob("*_best.pt")) or sorted(path.glob("*_model.pt"))
        such = f", such as {inside[0]}" if inside else ""
        raise ConfigError(f"--{flag} {path}: is a folder; give a file of weights{such}.")
    if path.suffix == INDEX_SUFFIX:  # of a checkpoint in parts
        return
    if check_header(path) == "safetensors" and find_spec("safetensors") is None:
        raise ConfigError(
            f"--{flag} {path}: a safetensors file, but the package safetensors isn't "
            "installed; run pip install 'paceline[safetensors]'."
        )


def _unwritten(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path}: the weights can't be written ({error.strerror}); make room, or give another "
        "--output_dir."
    )
