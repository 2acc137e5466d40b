"""A run's folder: `<output_dir>/<run_id>`, what it is for, and who may write there.

    config.toml            the run's configuration, with the data and workers of its newest start
    exchange.toml          how its gradients are exchanged, where that was measured
    <log>.log              the CSV log
    events.<member>.jsonl  a line a step
    <name>.pt              weights
    checkpoints/           what the run resumes from
    generation             the number of its newest generation
    lineage.json           that number, and the generations from which it descends
    finished               there once the run came to its end; the text says whether machine 0's
                           folder has one, too
    members/<name>.json    the run's processes, for `paceline stop` and `paceline status`
    .alive.<machine>       locked by a machine's processes while the run is active there

The system takes a lock back from a dead process. A start needs the lock of the whole file, and then
holds its first byte; each worker holds a byte of its own, so the run stays locked after the death
of its supervisor:

    byte    0                        1 + local rank
    holder  the process that opens   a worker beside it

Nothing is written before the folder is known to be free and of the same configuration.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import tomli_w

from paceline.atomic_write import explained_writes, write_atomically
from paceline.cluster.membership.lineage import Lineage, as_values, of_values
from paceline.config.train import continues, difference, edits
from paceline.errors import ConfigError, Message, PacelineError
from paceline.observe.last_state import last_state

CONFIG_NAME = "config.toml"
FINISHED_NAME = "finished"
_FINISHED = b"finished\n"  # the file's content
_UNCONFIRMED = b"finished without machine 0\n"  # or this: machine 0 hasn't confirmed it
_LONGEST_NUMBER = 18  # digits of a generation
GENERATION_NAME = "generation"
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of fcntl(2): type, whence, start, length, pid
LINEAGE_NAME = "lineage.json"
_OF_START = (
    *(CONFIG_NAME, GENERATION_NAME, LINEAGE_NAME, "labels.txt"),
    *("*.log", "events.*.jsonl", "members/*"),
)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class RunFolder:
    """Folder of one run, locked by this process from `open` or `hold` until `close`."""

    def __init__(self, path: Path, *, shard_id: int) -> None:
        self.path = path
        self._shard_id = shard_id
        self._lock_path = path / f".alive.{shard_id}"
        self._lock: int | None = None
        self._created = False
        self._found = False  # it was there before this start

    def check(self, config: Mapping[str, object], *, anew: bool = False) -> None:
        """Look whether a run of this configuration may have the folder; change nothing of it.

        A lock that a dead start left is removed.

        Args:
            config: every flag that makes it this run, by name.
            anew: the run must not have begun.

        Raises:
            ConfigError: the run is alive, has begun and mustn't, or its configuration is another.
        """
        self._refuse_other(config)
        if anew and self.begun:
            raise ConfigError(
                flag="resume",
                value="no",
                rule=f"run {self.path.name} already exists",
                remedy=Message("give another {--run_id}, or remove {}", self.path),
            )
        if self._lock_path.exists():
            self._take_lock(0)
            self.close()

    def open(
        self, config: Mapping[str, object], started: Mapping[str, object] | None = None
    ) -> None:
        """Make or take the folder for a run of this configuration.

        Args:
            config: every flag that makes it this run, by name.
            started: the further flags of this start that are recorded with them, by machine 0.

        Raises:
            ConfigError: the run is alive, its configuration is another, or the folder can't be
                written.
            PacelineError: the disk is full.
        """
        self._refuse_other(config)
        with explained_writes(self.path):
            try:
                self._found = self.path.exists()
                self._created = not self._found
                self.path.mkdir(parents=True, exist_ok=True)
                self._take_lock(0)
                self._write_config(config, started or {})
                (self.path / FINISHED_NAME).unlink(missing_ok=True)  # it trains again
            except OSError as error:
                self.close()
                if error.errno in _FULL:
                    raise
                raise ConfigError(
                    flag="output_dir",
                    rule=f"{self.path} can't be written ({error.strerror})",
                    remedy="give a folder where you may write",
                ) from error

    def hold(self, local_rank: int) -> None:
        """Lock the folder as a worker, while the process that opened it has it locked.

        Raises:
            ConfigError: another process has the worker's byte.
        """
        with explained_writes(self.path):
            self._take_lock(1 + local_rank)

    def finished_as(self, config: Mapping[str, object]) -> bool:
        """Return whether the run came to its end, as far as this configuration trains.

        Machine 0 decides: the mark of another machine that it hasn't confirmed doesn't count.

        Args:
            config: every flag that makes it this run, by name.
        """
        known = _read(self.path / CONFIG_NAME)
        decided = self._shard_id == 0 or self.confirmed
        finished = decided and is_finished(self.path)
        return finished and not (known and self._other_end(config, known))

    def edits(self, config: Mapping[str, object]) -> list[str]:
        """Return the hyperparameters that a start of the run would change, each with both values.

        Args:
            config: every flag that makes it this run, by name.
        """
        known = _read(self.path / CONFIG_NAME)
        return [
            f"--{name} {value} instead of {known.get(name)}"
            for name, value in edits(known, config).items()
        ]

    def begun_as(self, config: Mapping[str, object]) -> bool:
        """Return whether the run was started before, on this machine, to the same end.

        Args:
            config: every flag that makes it this run, by name.
        """
        known = _read(self.path / CONFIG_NAME)
        return bool(known) and not self._other_end(config, known)

    @property
    def begun(self) -> bool:
        """Return whether the run was started before, on this machine."""
        return (self.path / CONFIG_NAME).exists()

    @property
    def confirmed(self) -> bool:
        """Return whether machine 0 has confirmed the mark of the run's end, if there is one."""
        path = self.path / FINISHED_NAME
        return not path.is_file() or path.read_bytes() != _UNCONFIRMED

    def finish(self, confirmed: bool = True) -> None:
        """Write down that the run came to its end.

        Args:
            confirmed: whether machine 0's folder is marked, too, or this is that folder.

        Raises:
            PacelineError: the folder can't be written.
        """
        path = self.path / FINISHED_NAME
        with explained_writes(path):
            write_atomically(path, _FINISHED if confirmed else _UNCONFIRMED)

    def close(self) -> bool:
        """Release the folder; the last of its holders removes the file of the lock.

        Returns:
            whether this was the last one.
        """
        lock = self._lock
        self._lock = None
        if lock is None:
            return False
        last = False
        with suppress(OSError):  # another process of the run still holds it
            fcntl.lockf(lock, fcntl.LOCK_UN)  # of two that close at once, one is the last
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            last = _is_named(lock, self._lock_path)  # else it is a later start's
            if last:
                self._lock_path.unlink()
        os.close(lock)
        if not self.begun and not self._found:  # it was discarded while this process held it
            with suppress(OSError):
                self.path.rmdir()
        return last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the folder; where the start was refused, remove what it has made of it."""
        if isinstance(error, ConfigError):
            self.discard()
        else:
            self.close()

    def discard(self) -> None:
        """Close the folder of a start that was refused; remove what the start has made of it.

        A folder that was there before, or that has a step, stays, as do files of other names.
        """
        if self._created and not self._has_steps():
            with suppress(OSError):  # the refusal is what the user must read
                for name in _OF_START:
                    for path in self.path.glob(name):
                        path.unlink(missing_ok=True)
                self._lock_path.unlink(missing_ok=True)
                for folder in (self.path / "members", self.path):
                    if folder.exists():
                        folder.rmdir()
        self._created = False
        self.close()

    def _other_end(self, config: Mapping[str, object], known: Mapping[str, object]) -> bool:
        """Return whether the run, as it is known, isn't this one, or ended elsewhere."""
        last = last_state(self.path)
        complete = last.ended and not last.reason
        return bool(difference(config, known)) or continues(known, config, complete=complete)

    def _has_steps(self) -> bool:
        """Return whether a step was trained in the folder."""
        if next(self.path.glob("checkpoints/*.pt"), None) is not None:
            return True
        files = self.path.glob("events.*.jsonl")
        return any(b'"event": "step"' in events.read_bytes() for events in files)

    def _write_config(self, config: Mapping[str, object], started: Mapping[str, object]) -> None:
        """Write the configuration of a new run, or of one that continues with more epochs.

        Hyperparameters stay as they were: `record_edits` records those of a start that isn't
        refused.
        """
        path = self.path / CONFIG_NAME
        known = _read(path)
        flags = known or dict(config)
        if known and difference(config, known):
            flags = {**config, **edits(config, known)}
        if self._shard_id == 0:
            flags = {**flags, **started}
        if flags != known:
            write_atomically(path, tomli_w.dumps(flags))

    def _refuse_other(self, config: Mapping[str, object]) -> None:
        known = _read(self.path / CONFIG_NAME)
        wanted: dict[str, Any] = tomllib.loads(tomli_w.dumps(dict(config)))
        if known and (name := difference(known, wanted)):
            raise ConfigError(
                flag="run_id",
                value=self.path.name,
                rule=Message(
                    f"this run was started with {{--{name}}} {{}}, but {{--{name}}} is now {{}}",
                    known.get(name),
                    wanted.get(name),
                ),
                remedy=Message("restore the former value, or give another {--run_id}"),
            )

    def _take_lock(self, byte: int) -> None:
        """Lock a byte; byte 0 only where no other byte is locked."""
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if byte:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            else:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.lockf(lock, fcntl.LOCK_UN, 0, 1)
        except (BlockingIOError, PermissionError) as error:
            holder = _holder(lock)
            os.close(lock)
            raise ConfigError(
                flag="run_id",
                value=self.path.name,
                rule=f"this run is active on this machine{holder}",
                remedy=Message(
                    "end it with `paceline stop {}`, or give another {--run_id}", self.path
                ),
            ) from error
        if not _is_named(lock, self._lock_path):  # its last holder has just removed it
            os.close(lock)
            self._take_lock(byte)
            return
        self._lock = lock


def read_configuration(run: Path) -> dict[str, Any]:
    """Return a run's flags and their values, as `config.toml` has them; {} where there is none.

    Raises:
        PacelineError: the file can't be read.
    """
    return _read(run / CONFIG_NAME)


def is_finished(run: Path) -> bool:
    """Return whether a run is finished: by the contents of its file, not the name alone.

    Earlier versions left an empty file; there the last line of an event file must confirm it.
    """
    path = run / FINISHED_NAME
    if not path.is_file():
        return False
    content = path.read_bytes()
    if content:
        return content in (_FINISHED, _UNCONFIRMED)
    files = (events.read_bytes().rstrip() for events in run.glob("events.*.jsonl"))
    return any(b'"event": "end"' in lines.rpartition(b"\n")[2] for lines in files)


def record_edits(run: Path, config: Mapping[str, object]) -> None:
    """Record the hyperparameters that a start edits, once the start can't be refused any more.

    Args:
        run: the run's folder, which has a configuration.
        config: every flag that makes it this run, by name.

    Raises:
        PacelineError: the folder can't be written.
    """
    path = run / CONFIG_NAME
    known = _read(path)
    if edited := edits(known, config):
        with explained_writes(path):
            write_atomically(path, tomli_w.dumps({**known, **edited}))


def next_generation(run: Path) -> int:
    """Return the number after that of the run's newest generation; 0 if there is none.

    Args:
        run: the run's folder.

    Raises:
        PacelineError: the record of the number is damaged.
    """
    path = run / GENERATION_NAME
    if not path.exists():
        return 0
    text = path.read_bytes().strip()
    if not text.isdigit() or len(text) > _LONGEST_NUMBER:
        raise PacelineError(
            Message(
                "{} is damaged; it must contain the number of the run's last generation: "
                "write that number into it, or give another {--run_id}.",
                path,
            )
        )
    return int(text) + 1


def record_generation(run: Path, generation: int) -> None:
    """Record the number of the run's newest generation, before it writes anything.

    Raises:
        PacelineError: the folder can't be written.
    """
    path = run / GENERATION_NAME
    with explained_writes(path):
        write_atomically(path, f"{generation}\n")


def record_lineage(run: Path, number: int, lineage: Lineage) -> None:
    """Record the lineage of the run's newest generation, before it writes anything.

    Args:
        run: the run's folder, which exists.
        number: the generation's number.
        lineage: its ancestors and itself.

    Raises:
        PacelineError: the folder can't be written.
    """
    path = run / LINEAGE_NAME
    with explained_writes(path):
        text = json.dumps({"generation": number, "lineage": as_values(lineage)})
        write_atomically(path, f"{text}\n")


def recorded_lineage(run: Path) -> tuple[int, Lineage] | None:
    """Return the number and the lineage that `record_lineage` recorded; None without a record.

    Raises:
        PacelineError: the record can't be read.
    """
    path = run / LINEAGE_NAME
    try:
        values = json.loads(path.read_bytes())
        return int(values["generation"]), of_values(values["lineage"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PacelineError(
            Message(
                "{} can't be read ({}): restore the file, or remove it if no start of the run had "
                "to skip a damaged checkpoint.",
                path,
                error,
            )
        ) from error


def choose_run_id(output_dir: Path, digest: str, *older: str, anew: bool) -> str:
    """Return `<digest>-<n>`: the unfinished run of this configuration, or the next one.

    Args:
        output_dir: the folder of all runs.
        digest: of the configuration.
        older: digests that earlier versions made of it; their unfinished runs count as well.
        anew: start the next one, whether the last is finished or not.
    """
    for known in (digest, *older):
        last = output_dir / f"{known}-{_runs(output_dir, known)}"
        if not anew and last.exists() and not is_finished(last):
            return last.name
    return f"{digest}-{_runs(output_dir, digest) + 1}"


def _runs(output_dir: Path, digest: str) -> int:
    """Return the number of the last run of a digest, 0 where there is none."""
    number = 0
    while (output_dir / f"{digest}-{number + 1}").exists():
        number += 1
    return number


def _holder(lock: int) -> str:
    """Name the process that holds the lock, in brackets; "" where the kernel doesn't know it."""
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    pid = _FLOCK.unpack(fcntl.fcntl(lock, fcntl.F_GETLK, wanted))[4]
    return f" (process {pid} on {socket.gethostname()})" if pid > 0 else ""


def _is_named(lock: int, path: Path) -> bool:
    """Return whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise PacelineError(
            Message(
                "{} can't be read ({}): restore the file, or give another {--run_id}.",
                path,
                error,
            )
        ) from error
