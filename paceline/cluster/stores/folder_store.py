"""A `torch.distributed.Store` in a folder that the machines share, over NFS too.

No lock is ever taken, so no killed process can leave one behind. Everything rests on one promise
that file systems keep, NFS among them: of several processes that rename the same name, one wins.

    <folder>/key=<quoted key>/            a key; it exists when this directory does
                 head=<version>=<unique>  an empty file; its name says which file is the value
                 <unique>                 the value, complete before a head names it, never changed

- A new key is prepared as a directory under another name and renamed to its own, which fails where
  the key is there already.
- A change writes a value of a new unique name, then renames the head that it has *read* to one that
  names the new value. If another process came between, the old head is gone and the
  change starts again. As unique names never return, a process that stood still for an hour can't
  overwrite anything.
- The winner removes the old value. A reader whose value vanishes reads again.

An NFS client remembers listings and missing names for up to a minute. Setting a folder's time asks
the server and makes the client forget them, so that is done before each listing.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from torch.distributed import DistStoreError

from paceline.atomic_write import sync
from paceline.cluster.stores.polled_store import CompareAndSetStore, as_bytes
from paceline.errors import CommError, ConfigError

_GONE = (errno.ENOENT, errno.ESTALE)
"""Another process removed a file after its name was read; NFS reports ESTALE."""

_PRIVATE = 0o700
"""Of the folders: values hold the job token, which only this user may read."""

_THERE = (errno.EEXIST, errno.ENOTEMPTY)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class FolderRemoved(CommError):
    """Error of a store whose folder was removed."""


class FolderStore(CompareAndSetStore):
    """Key-value store in a shared folder; the module's docstring describes the files.

    Args:
        address: path of an existing folder.
        space: path of the store's own folder inside `address`.
        timeout: seconds that `get` waits; also the default timeout of `wait`.
        make: whether to create the store's folder if it is missing. If False, the store reads as
            empty and can't be written until another process has created the folder.

    Raises:
        ConfigError: the folder doesn't exist, or can't be created or written.
    """

    def __init__(self, address: str, space: str, timeout: timedelta, *, make: bool = False) -> None:
        super().__init__(address, space, timeout)
        self.path = Path(address, space)
        if not Path(address).is_dir():  # not made here: a mistyped one would wait for no machine
            raise ConfigError(
                flag="file_store_path",
                value=address,
                rule="there is no such folder",
                remedy="create it where all machines can access it",
            )
        if make:
            with self._translated_errors():
                self.path.mkdir(_PRIVATE, parents=True, exist_ok=True)

    def erase(self) -> None:
        """Remove the folder, at once: a process that still writes there can't bring it back.

        Also removes unfinished entries in the folder around it, and that folder if it is empty.
        """
        run = self.path.parent
        with suppress(FileNotFoundError):
            # One rename removes all keys at once; deleting
            # them one by one would show parts of a start.
            os.rename(self.path, run / _temporary_name())
        with suppress(FileNotFoundError):  # another process removes it at this moment
            for unfinished in run.glob("tmp=*"):
                shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):  # not empty: a new start of the run is already here
            run.rmdir()

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.read_version(key)[1] for key in keys]

    def missing(self, keys: Sequence[str]) -> list[str]:
        with self._translated_errors():
            names = set(_fresh_names(self.path))
            return [key for key in keys if _key_name(key) not in names]

    def set(self, key: str, value: str | bytes) -> None:
        data = as_bytes(value)
        self.update(key, lambda old: data)

    def delete_key(self, key: str) -> bool:
        with self._translated_errors():
            removed = self.path / _temporary_name()
            try:
                os.rename(self.path / _key_name(key), removed)
            except FileNotFoundError:
                return False
            shutil.rmtree(removed, ignore_errors=True)
            return True

    def persist(self, key: str) -> None:
        folder = self.path / _key_name(key)
        with self._translated_errors():
            for path in (*(folder / name for name in _fresh_names(folder)), folder, self.path):
                with _unless_gone():
                    sync(path)

    def read_version(self, key: str) -> tuple[str | None, bytes | None]:
        """Return the head's name and the value, or None and None where there is no key."""
        folder = self.path / _key_name(key)
        deadline = time.monotonic() + self.limit
        while time.monotonic() <= deadline:
            with self._translated_errors(), _unless_gone():
                if folder.name not in _fresh_names(self.path):
                    return None, None
                heads = [name for name in _fresh_names(folder) if name.startswith("head=")]
                if heads:  # a listing in the middle of a rename may show no head, or two
                    head = max(heads)
                    return head, (folder / head.rpartition("=")[2]).read_bytes()
        raise DistStoreError(
            f"The key folder {folder} is damaged: it has no head file that points to a value. "
            "Remove the folder."
        )

    def replace(self, key: str, version: str | None, value: bytes) -> bool:
        with self._translated_errors():
            return (
                self._create(key, value) if version is None else self._advance(key, version, value)
            )

    def _create(self, key: str, value: bytes) -> bool:
        folder = self.path / _temporary_name()
        unique = uuid.uuid4().hex
        try:
            # Complete before it has its name: a reader finds the whole key or none.
            folder.mkdir(_PRIVATE)
            (folder / unique).write_bytes(value)
            (folder / _head_name(1, unique)).touch()
            os.rename(folder, self.path / _key_name(key))
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            if error.errno not in (*_GONE, *_THERE):
                raise
            if not self.path.exists():
                raise FolderRemoved(f"The shared folder {self.path} was removed.") from error
            return False
        return True

    def _advance(self, key: str, head: str, value: bytes) -> bool:
        folder = self.path / _key_name(key)
        _, version, old = head.split("=")
        unique = uuid.uuid4().hex
        successor = _head_name(int(version, 16) + 1, unique)
        try:
            (folder / unique).write_bytes(value)
            os.rename(folder / head, folder / successor)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            # An NFS client repeats a rename whose answer was lost, and gets "not there".
            if successor not in _fresh_names(folder):
                (folder / unique).unlink(missing_ok=True)
                return False
        (folder / old).unlink(missing_ok=True)
        return True

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FORBIDDEN:
                raise ConfigError(
                    f"The shared folder {self.path}: {error.strerror}; give a folder that this "
                    "user can write on all machines."
                ) from error
            raise CommError(f"The shared folder {self.path} failed: {error.strerror}.") from error


def _fresh_names(folder: Path) -> list[str]:
    """List a folder as the server has it now; a folder that isn't there is empty."""
    with _unless_gone():
        # This makes an NFS client ask the server, and forget what it remembered of the listing.
        os.utime(folder)
        return os.listdir(folder)
    return []


@contextmanager
def _unless_gone() -> Iterator[None]:
    """End the block without an error where a file or folder in it was removed."""
    try:
        yield
    except OSError as error:
        if error.errno not in _GONE:
            raise


def _key_name(key: str) -> str:
    quoted = quote(key, safe="")
    if len(quoted) > 200:  # a file name has at most 255 bytes
        quoted = f"{quoted[:100]}~{sha256(key.encode()).hexdigest()}"
    return f"key={quoted}"


def _head_name(version: int, unique: str) -> str:
    return f"head={version:016x}={unique}"


def _temporary_name() -> str:
    return f"tmp={uuid.uuid4().hex}"
