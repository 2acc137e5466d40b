"""Files of weights: plain `model.state_dict()`, written at once or not at all.

    torch.save of a state dict, or of a dict that has one as "model", as a run's checkpoints do
    safetensors, where its package is installed

What is read never runs code: a file that holds more than tensors and plain values is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from paceline.atomic_write import atomic_file
from paceline.errors import CheckpointError, ConfigError
from paceline.state.file_integrity import check_header, check_integrity, load_file
from paceline.state.weights_fit import fit


def save_weights(path: Path, model: nn.Module) -> None:
    """Write the model's state dict, contiguous; a reader sees the old file or the new one, whole.

    Raises:
        CheckpointError: the file can't be written (disk, permissions).
    """
    state = model.state_dict()
    for name, value in state.items():
        state[name] = value.contiguous() if isinstance(value, torch.Tensor) else value
    try:
        with atomic_file(path) as file:
            torch.save(state, file)
    except OSError as error:
        raise CheckpointError(
            f"{path}: the weights can't be written ({error.strerror}); make room, or give another "
            "--output_dir."
        ) from error


def load_weights(path: Path, model: nn.Module) -> tuple[str, ...]:
    """Copy a file's weights into the model, of the same names and shapes.

    A last layer for another number of labels stays as it is. Weights of another floating-point type
    are converted.

    Returns:
        what was left out, in sentences.

    Raises:
        ConfigError: there is no such file, its package isn't installed, or its weights are another
            model's; the model is as it was.
        CheckpointError: the file is damaged or holds something else.
    """
    check_weights(path)
    check_integrity(path)
    state = load_file(path)
    if isinstance(state, Mapping) and isinstance(state.get("model"), Mapping):
        state = state["model"]
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(
            f"{path}: contains no named weights; give a file of a model's state_dict()."
        )
    weights, notes, differences = fit(state, model)
    if differences:
        raise ConfigError(
            f"--load_model_path {path}: the weights belong to another model: "
            f"{'; '.join(differences)}. Give the --model that they were trained with."
        )
    model.load_state_dict(weights, strict=False)
    return tuple(f"{path}: {note}" for note in notes)


def check_weights(path: Path) -> None:
    """Look at the ends of a file, without reading it: is it there, of a known format, not torn.

    Raises:
        ConfigError: there is no such file, or its package isn't installed.
        CheckpointError: the file is torn or something else.
    """
    if not path.exists():
        raise ConfigError(f"--load_model_path {path}: there is no such file; check the path.")
    if check_header(path) == "safetensors" and find_spec("safetensors") is None:
        raise ConfigError(
            f"--load_model_path {path}: a safetensors file, but the package safetensors isn't "
            "installed; run pip install 'paceline[safetensors]'."
        )
