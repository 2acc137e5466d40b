"""Weights & Biases: one W&B run for the run, whose id is in the run's folder."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import wandb

from paceline.atomic_write import write_atomically
from paceline.errors import ConfigError
from paceline.observe.trackers.tracker import END_S, Point

ID_NAME = "wandb.id"  # the file of the id
_STEP = "step"  # the axis; W&B's own drops the values of steps that a run repeats


class WandbWriter:
    """Writer of a W&B run; a resumed run continues it.

    Project, entity, mode and server are those of W&B's settings and environment variables. W&B
    doesn't collect the command line, which may contain a password, nor the console.

    Args:
        folder: the run's folder, in which W&B has its files.
        parameters: the run's configuration.

    Raises:
        ConfigError: W&B is online and has no API key.
    """

    def __init__(self, folder: Path, parameters: Mapping[str, object]) -> None:
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise ConfigError("no API key; run `wandb login`, or set WANDB_MODE=offline")
        path = folder / ID_NAME
        if not path.exists():
            write_atomically(path, f"{secrets.token_hex(8)}\n")
        self._run = wandb.init(
            id=path.read_text().strip(),
            resume="allow",
            name=folder.name,
            dir=folder,
            config=dict(parameters),
            allow_val_change=True,
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_meta=True,  # the command line is part of it
                disable_git=True,
                disable_code=True,
                finish_timeout=END_S,
            ),
        )
        self._run.define_metric("*", step_metric=_STEP)
        url = None if self._run.offline else self._run.url
        self.place = url or str(Path(self._run.dir).parent)

    def write(self, points: Sequence[Point]) -> None:
        """Write values, a row for each point."""
        for point in points:
            self._run.log({_STEP: point.step, **point.values})

    def note(self, text: str, step: int) -> None:
        """Write a sentence as the value `note`."""
        self._run.log({_STEP: step, "note": text})

    def go_back(self, step: int) -> None:
        """Keep the earlier values: W&B can't remove them."""

    def close(self, *, complete: bool) -> None:
        """Upload what is left; an incomplete run is shown as failed until it is resumed."""
        self._run.finish(exit_code=0 if complete else 1)
