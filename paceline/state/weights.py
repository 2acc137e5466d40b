"""Files of weights: plain `model.state_dict()`, written at once or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from paceline.errors import CheckpointError, ConfigError

_LONGEST = 200  # characters of a reason in a message


def save_weights(path: Path, model: nn.Module) -> None:
    """Write the model's state dict, contiguous; a reader sees the old file or the new one, whole.

    Raises:
        CheckpointError: the file can't be written (disk, permissions).
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            state = model.state_dict()
            for name, value in state.items():
                state[name] = value.contiguous() if isinstance(value, torch.Tensor) else value
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, RuntimeError) as error:  # torch wraps a full disk in a RuntimeError
        part.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: the weights can't be written: {error}") from error


def load_weights(path: Path, model: nn.Module) -> None:
    """Copy a file's weights into the model, of the same names and shapes.

    Raises:
        ConfigError: there is no such file, or its weights are another model's.
        CheckpointError: the file is damaged or holds something else.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"--load_model_path {path}: there is no such file.") from error
    except Exception as error:  # torch's unpickler stumbles over damage in many ways
        raise CheckpointError(
            f"--load_model_path {path}: not a file of weights, or damaged; give one that a run or "
            "torch.save wrote."
        ) from error
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--load_model_path {path}: the weights are another model's: {_first_reason(error)}"
        ) from error


def _first_reason(error: Exception) -> str:
    """Return the first of the reasons that torch lists, cut to a readable length."""
    lines = [line.strip() for line in str(error).splitlines()]
    reason = lines[1] if len(lines) > 1 else lines[0]
    return reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]}…"
