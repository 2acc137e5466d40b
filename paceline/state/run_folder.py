"""A run's folder: `<output_dir>/<run_id>`, what it is for, and who may write there.

    config.toml            what the run was told
    <log>.log              the CSV log
    events.rank<r>.jsonl   a line a step
    <name>.pt              weights

A lock, which the system takes back from a dead process, tells whether the run is alive on this
machine. Nothing is written before the folder is known to be free and of the same configuration.
"""

from __future__ import annotations

import fcntl
import os
import tomllib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from paceline.errors import ConfigError, PacelineError

CONFIG_NAME = "config.toml"


class RunFolder:
    """The folder of one run, held by this machine's process until `close`."""

    def __init__(self, path: Path, *, shard_id: int) -> None:
        self.path = path
        self._lock_path = path / f".alive.{shard_id}"
        self._lock: int | None = None

    def check(self, config: Mapping[str, object]) -> None:
        """Look, without writing, whether a run of this configuration may have the folder.

        Raises:
            ConfigError: the run is alive, or its configuration is another.
        """
        self._refuse_other(config)
        if self._lock_path.exists():
            self._take_lock()
            self.close()

    def open(self, config: Mapping[str, object]) -> None:
        """Make or take the folder for a run of this configuration.

        Args:
            config: every flag that makes it this run, by name.

        Raises:
            ConfigError: the run is alive, its configuration is another, or the folder can't be
                written.
        """
        self._refuse_other(config)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            if not (self.path / CONFIG_NAME).exists():
                _write(self.path / CONFIG_NAME, tomli_w.dumps(dict(config)))
        except OSError as error:
            raise ConfigError(
                f"--output_dir: {self.path} can't be written ({error.strerror}): "
                "give a folder where you may write."
            ) from error

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def _refuse_other(self, config: Mapping[str, object]) -> None:
        known = _read(self.path / CONFIG_NAME)
        wanted: dict[str, Any] = tomllib.loads(tomli_w.dumps(dict(config)))
        for name in [*wanted, *known] if known else ():
            if known.get(name) != wanted.get(name):
                raise ConfigError(
                    f"--run_id {self.path.name}: this run was started with --{name} "
                    f"{known.get(name)}, now it is {wanted.get(name)}; give the same or another "
                    "--run_id."
                )

    def _take_lock(self) -> None:
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            os.close(lock)
            raise ConfigError(
                f"--run_id {self.path.name}: this run is alive on this machine; stop it, or give "
                "another --run_id."
            ) from error
        self._lock = lock


def next_run_id(output_dir: Path, digest: str) -> str:
    """Return `<digest>-<n>` with the smallest n ≥ 1 that no folder in `output_dir` has."""
    number = 1
    while (output_dir / f"{digest}-{number}").exists():
        number += 1
    return f"{digest}-{number}"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise PacelineError(f"{path} can't be read: {error}") from error


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")  # machines may share the folder
    part.write_text(text)
    part.replace(path)
