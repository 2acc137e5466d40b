"""The images of a run: those of its test data, where a command is given no others."""

from __future__ import annotations

from pathlib import Path

from paceline.config.train import TrainConfig
from paceline.data.source import Source
from paceline.errors import ConfigError, Message
from paceline.session.sources import open_source
from paceline.state.run_folder import read_configuration


def open_test_data(
    config: TrainConfig, folder: Path | None, given: str, *, trained: bool = False
) -> Source:
    """Open a database of images, or a run's.

    Args:
        config: the run's configuration, without its data.
        folder: the run's; None: there is none.
        given: the database's path; "": the run's test data.
        trained: without test data, open those of the training.

    Raises:
        ConfigError: there is no such database, or none is known.
        DataError: it isn't a database, or one of unknown records.
    """
    seed = config.optim.seed
    if given:
        return open_source("test_data", given, config.data, seed + 1)
    known = {} if folder is None else read_configuration(folder)
    if path := known.get("test_data"):
        return open_source("test_data", path, config.data, seed + 1)
    if trained and (path := known.get("train_data")):
        return open_source("train_data", path, config.data, seed)
    raise ConfigError(
        Message(
            "{--test_data}: no database is given, and {}: give the path of one{}.",
            "there is no run that has one" if folder is None else f"{folder.name} records none",
            Message(", or images by {--images}") if trained else "",
        )
    )
