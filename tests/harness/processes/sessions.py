"""Sessions of `paceline train` in this process, over runs that are connected already."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from torch._C._distributed_c10d import HashStore

from paceline.cli.worker import open_session
from paceline.config.train import TrainConfig
from paceline.generation.run import Run
from paceline.session.resume.start import Start
from paceline.session.session import Session


def session_of(
    config: TrainConfig,
    run: Run,
    folder: Path,
    resources: ExitStack,
    start: Start | None = None,
) -> Session:
    """Return the session of a rank.

    Args:
        config: the flags.
        run: the run of the rank; without a store, it gets one of its own.
        folder: the run's.
        resources: closes what the session opens.
        start: where the run starts; by default at its beginning.
    """
    session = open_session(config, run.context.device, resources)
    session.run = run
    session.folder = folder
    run.store = run.store or HashStore()
    folder.mkdir(parents=True, exist_ok=True)
    session.start_from(start or Start())
    return session
