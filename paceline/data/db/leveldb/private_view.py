"""A private view of a LevelDB: a folder that LevelDB may open, lock and tidy as if it were its own.

LevelDB admits one process, and opening writes: a new MANIFEST, a table made of the log. So every
process opens a folder of its own instead, and the database stays as it is, bit for bit:

    VIEW/000005.ldb → DATABASE/000005.ldb     live tables: symbolic links, on any file system
    VIEW/CURRENT, MANIFEST-*, *.log           copies: LevelDB writes or removes these
    VIEW/000017.ldb/ and so on                fences, see `fence`
    VIEW.lock                                 locked while the process lives; the kernel sees to it

Before a view is made, those whose lock no process holds are removed: their processes were killed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

from paceline.data.db.database_files import LEVELDB_CURRENT, leveldb_files, leveldb_manifest
from paceline.data.db.leveldb.manifest import live_tables
from paceline.errors import ConfigError, DataError

_SPARE_BYTES = 16 << 20  # LevelDB's messages, and the first tables of a compaction
_FENCES = 64  # more tables than a compaction can begin before they stand
_ATTEMPTS = 100  # each fails only if a cleaner met a lock file in the instant of its making


class LevelDbView:
    """Private working folder with the files of a LevelDB, except its lock file.

    Attributes:
        path: path of the working folder, for LevelDB to open; `close()` removes it.
        log_bytes: total size of the database's logs, which LevelDB turns into a table when it opens
            the database.
    """

    def __init__(self, database: Path, cache_dir: Path | None) -> None:
        """Make a view of `database` under `cache_dir`, or else in the system's temporary folder.

        Raises:
            ConfigError: nothing can be written there.
            DataError: the disk has too little room there, or the database is incomplete.
        """
        # One for each machine: on a network folder one can't always see another's locks.
        name = f"paceline-views-{os.geteuid()}-{os.uname().nodename}"
        base = (cache_dir or Path(tempfile.gettempdir())).absolute() / name
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            if base.stat().st_uid != os.geteuid():  # in /tmp any user can take a name
                raise ConfigError(
                    f"{base} belongs to another user; give a --cache_dir of your own for LevelDB's "
                    "working files."
                )
            remove_stale_views(base)
            self.path, self._lock = _locked_path(base)
        except OSError as error:
            raise ConfigError(
                f"{base}: LevelDB's working files can't be written there ({error.strerror}); "
                "give a --cache_dir that can be written."
            ) from error
        try:
            self.log_bytes = _fill(self.path, database)
        except BaseException:
            self.close()
            raise

    def fence(self) -> None:
        """Keep LevelDB from rewriting the tables here; call at once after opening.

        LevelDB merges tables in the background after opening and after many reads, up to a whole
        copy of the data in each view, and has no option against it. But a merge that can't make its
        next table gives up for good, and reading continues. So folders take the next tables' names.
        """
        highest = max(int(re.sub(r"\D", "", p.name) or 0) for p in self.path.iterdir())
        for number in range(highest + 1, highest + 1 + _FENCES):
            try:
                (self.path / f"{number:06}.ldb").mkdir()
            except FileExistsError:  # a merge was quicker; it meets the next fence
                continue

    def close(self) -> None:
        """Remove the view; LevelDB must have closed it."""
        _remove(self.path)
        os.close(self._lock)


def remove_stale_views(base: Path) -> None:
    """Remove the views in `base` whose processes have ended without closing them."""
    for lock_file in base.glob("*.lock"):
        try:
            lock = os.open(lock_file, os.O_RDWR)
        except FileNotFoundError:  # closed by its owner or removed by another process just now
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(lock_file.with_suffix(""))
        except BlockingIOError:  # in use
            continue
        finally:
            os.close(lock)


def _remove(view: Path) -> None:
    """Remove a view whose lock is held by the caller, the lock's file last."""
    if view.exists():
        shutil.rmtree(view)
    view.with_suffix(".lock").unlink(missing_ok=True)


def _locked_path(base: Path) -> tuple[Path, int]:
    """Choose a new view's name and hold its lock, before the view itself is there."""
    for _ in range(_ATTEMPTS):
        path = base / f"{os.getpid()}-{os.urandom(4).hex()}"
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a cleaner took the unlocked file for a killed process's
            os.close(lock)
            continue
        if os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)  # the cleaner was even done with it
    raise DataError(
        f"{base}: couldn't create and lock a working folder for LevelDB in {_ATTEMPTS} attempts; "
        "try again."
    )


def _fill(view: Path, database: Path) -> int:
    """Link and copy a database's files into a new view; return the bytes of its logs."""
    logs = leveldb_files(database, ".log")
    try:
        manifest = leveldb_manifest(database)
        tables = _live_tables(database.resolve(), manifest)
        copied = [database / LEVELDB_CURRENT, manifest, *logs]
        log_bytes = sum(log.stat().st_size for log in logs)
        needed = sum(file.stat().st_size for file in copied) + log_bytes + _SPARE_BYTES
    except FileNotFoundError as error:
        raise DataError(
            f"{error.filename} is missing: the database is incomplete, copy it again."
        ) from error
    free = shutil.disk_usage(view.parent).free
    if free < needed:
        raise DataError(
            f"{view.parent} has {free >> 20} MiB free, and opening {database} needs "
            f"{needed >> 20} MiB there for each process; make room, or give another --cache_dir."
        )
    view.mkdir(mode=0o700)
    for table in tables:
        (view / table.name).symlink_to(table)
    for file in copied:
        shutil.copyfile(file, view / file.name)
    return log_bytes


def _live_tables(database: Path, manifest: Path) -> list[Path]:
    try:
        sizes = live_tables(manifest.read_bytes())
    except ValueError as error:
        raise DataError(f"{manifest} is damaged ({error}); copy the database again.") from error
    tables = leveldb_files(database, ".ldb", ".sst")
    by_number = {int(table.stem): table for table in tables if table.stem.isdecimal()}
    missing = sizes.keys() - by_number.keys()
    if missing:
        raise DataError(
            f"{database}: {len(missing)} of its {len(sizes)} tables are missing (the first is "
            f"{min(missing):06}.ldb); the database is incomplete, copy it again."
        )
    for number, wanted in sorted(sizes.items()):
        size = by_number[number].stat().st_size
        if size != wanted:
            raise DataError(
                f"{by_number[number]} has {size} of {wanted} bytes: the copy is incomplete; copy "
                "the database again."
            )
    return [by_number[number] for number in sorted(sizes)]
