"""The table of trackers: the package that each needs, and its writer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import ConfigError
from paceline.observe.trackers.tracker import OpenWriter, Tracker


def _tensorboard() -> OpenWriter:
    from paceline.observe.trackers.tensorboard_writer import TensorBoardWriter

    return TensorBoardWriter


def _wandb() -> OpenWriter:
    from paceline.observe.trackers.wandb_writer import WandbWriter

    return WandbWriter


def _mlflow() -> OpenWriter:
    from paceline.observe.trackers.mlflow_writer import MlflowWriter

    return MlflowWriter


# Each imports its package, which has the tracker's name, when it is called.
TRACKERS: Mapping[str, Callable[[], OpenWriter]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}


def require_installed(names: Iterable[str]) -> None:
    """Require the package of each tracker.

    Raises:
        ConfigError: one isn't installed; names the extra of Paceline that installs it.
    """
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, such as W&B makes
            raise ConfigError(
                flag="tracker",
                value=name,
                rule=f"the package {name} isn't installed",
                remedy=f"run pip install 'paceline[{name}]'",
            )


def open_trackers(
    names: Iterable[str],
    folder: Path,
    parameters: Mapping[str, object],
) -> list[Tracker]:
    """Open trackers of a run.

    Args:
        names: which ones.
        folder: the run's, which exists.
        parameters: the run's configuration, without passwords.
    """
    return [Tracker(name, partial(TRACKERS[name](), folder, parameters)) for name in names]
