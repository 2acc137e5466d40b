"""Whether a run can go on from what it is told to: looked at before anything of it starts.

A checkpoint stands at a step of an epoch. With other data, or batches of another size, that step is
another place: samples would be lost, or trained twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.config.run import OutputConfig
from paceline.data.order import Order
from paceline.errors import CheckpointError, ConfigError
from paceline.state.checkpoint_files import Checkpoints, read_checkpoint


def check_origin(output: OutputConfig, run: Path) -> None:
    """Look, without reading it, whether the checkpoint to start from is there, if it is needed.

    Args:
        output: says what to resume from.
        run: the run's folder, rank 0's; a checkpoint of its own comes first.

    Raises:
        ConfigError: `--resume` names a file that isn't there.
    """
    if output.resume in ("auto", "no") or any(Checkpoints(run, 1).newest_first()):
        return
    if not Path(output.resume).is_file():
        raise ConfigError(
            flag="resume",
            value=output.resume,
            rule="there is no such file",
            remedy="give auto, no, or a checkpoint",
        )


def check_order(output: OutputConfig, run: Path, order: Order, fingerprint: str) -> None:
    """Look whether the checkpoint to start from stands at a step of the same epochs.

    Args:
        output: says what to resume from.
        run: the run's folder, rank 0's; a checkpoint of its own comes first.
        order: of the images that the run will train.
        fingerprint: of these images; checkpoints of earlier versions have none.

    Raises:
        ConfigError: its run had other data or batches.
        CheckpointError: `--resume` names a file that is torn, or something else.
    """
    path, state = _peek(output, run)
    if "order" not in state:
        return
    kept, wanted = _words(Order(**state["order"])), _words(order)
    if kept != wanted:
        raise ConfigError(
            f"{path} was made with {kept}, and this run has {wanted}; give the data and flags that "
            "it was made with, or its weights to a new run by --load_model_path."
        )
    if state.get("data", fingerprint) != fingerprint:
        raise ConfigError(
            f"{path} was made with other images or labels, of the same number; give the data that "
            "it was made with, or its weights to a new run by --load_model_path."
        )


def _peek(output: OutputConfig, run: Path) -> tuple[Path, Mapping[str, Any]]:
    """Look into the newest checkpoint that isn't torn; those that are will be named by rank 0."""
    own = list(Checkpoints(run, 1).newest_first())
    for path in own:
        with suppress(CheckpointError):
            return path, read_checkpoint(path, peek=True)
    if own or output.resume in ("auto", "no"):
        return run, {}
    return Path(output.resume), read_checkpoint(Path(output.resume), peek=True)


def _words(order: Order) -> str:
    return f"{order.size:,} images, {order.samples:,} an epoch and {order.batch_size:,} a step"
