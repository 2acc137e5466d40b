"""Finding a run's folder, from its path or its id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.cluster.supervision.requests.member_record import FOLDER
from paceline.errors import ConfigError, Message
from paceline.observe.event_file import find_event_files
from paceline.state.run_folder import CONFIG_NAME

_NAMED = 5  # runs, of those of a folder


def find_run(run: str, output_dir: Path) -> Path:
    """Return a run's folder, given its path or id.

    Raises:
        ConfigError: there is none.
    """
    for folder in (Path(run), output_dir / run):
        if _is_run(folder):
            return folder.resolve()
    known = sorted(path.parent.name for path in output_dir.glob(f"*/{CONFIG_NAME}"))
    raise ConfigError(
        Message(
            "{} is neither a run folder nor the id of a run in {--output_dir} {}{}; check the "
            "path.",
            run,
            output_dir,
            known_runs(known),
        )
    )


def find_run_or_weights(run: str, output_dir: Path) -> tuple[Path | None, str]:
    """Return the run's folder and the file of weights that a path or an id names.

    Returns:
        the folder, None where the file isn't in one; and the file's path, "" where a run was given.

    Raises:
        ConfigError: there is neither.
    """
    file = Path(run)
    if file.is_file():
        parent = file.absolute().parent
        around = (parent, parent.parent)  # a run's checkpoints have a folder of their own
        return next((folder.resolve() for folder in around if _is_run(folder)), None), run
    return find_run(run, output_dir), ""


def runs_in(output_dir: Path) -> list[Path]:
    """Return the folders of all runs in a folder, by name."""
    return sorted(folder for folder in output_dir.glob("*") if folder.is_dir() and _is_run(folder))


def known_runs(names: Sequence[str]) -> str:
    """Return a clause that names the runs of a folder, of many the last ones; "" without any."""
    if len(names) > _NAMED:
        return f", which has {len(names):,} runs, such as {', '.join(names[-_NAMED:])}"
    return f", which has {', '.join(names)}" if names else ""


def _is_run(folder: Path) -> bool:
    named = (folder / CONFIG_NAME).is_file() or (folder / FOLDER).is_dir()
    return named or bool(find_event_files(folder))
