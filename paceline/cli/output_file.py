"""Files that a command writes where the user says."""

from __future__ import annotations

from pathlib import Path

from paceline.atomic_write import write_atomically
from paceline.errors import ConfigError


def write_output(flag: str, path: str, content: str | bytes) -> None:
    """Write the file that a flag names, complete or not at all.

    Raises:
        ConfigError: it can't be written; names the flag.
    """
    try:
        write_atomically(Path(path), content)
    except OSError as error:
        raise ConfigError(
            flag=flag,
            value=path,
            rule=f"it can't be written ({error.strerror})",
            remedy="give a path in a folder that you can write",
        ) from error
