"""Files that a command writes where the user says."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.atomic_write import write_atomically
from paceline.errors import ConfigError


def check_output(flag: str, path: str) -> None:
    """Refuse a path at which no file can be written, before the work whose result goes there.

    Raises:
        ConfigError: it is a folder, or in one that isn't there or can't be written; names the flag.
    """
    folder = Path(path).parent
    rule = ""
    if Path(path).is_dir():
        rule = "is a folder"
    elif not folder.is_dir():
        rule = "is in a folder that isn't there"
    elif not os.access(folder, os.W_OK):
        rule = "is in a folder that you can't write"
    if rule:
        remedy = "give the name of a file in a folder that you can write"
        raise ConfigError(flag=flag, value=path, rule=rule, remedy=remedy)


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
