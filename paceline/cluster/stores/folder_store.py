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
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Self
from urllib.parse import quote

from torch.distributed import DistStoreError

from paceline.cluster.stores.polled_store import ChangedStore, as_bytes
from paceline.config.world import WorldConfig
from paceline.errors import CommError, ConfigError

_GONE = (errno.ENOENT, errno.ESTALE)
"""Somebody removed a file after we had read its name; ESTALE is NFS's word for it."""

_PRIVATE = 0o700
"""Of the folders: values hold the job token, which only this user may read."""

_THERE = (errno.EEXIST, errno.ENOTEMPTY)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class FolderRemoved(CommError):
    """Somebody removed the store."""


class FolderStore(ChangedStore):
    """Keys and values in a folder; see the module's text.

    Args:
        path: the folder.
        timeout: the limit of `get` and of a `wait` that gives none.
        make: make the folder where it isn't there; otherwise it is empty until another process
            does, and can't be written.

    Raises:
        ConfigError: the folder can't be made or written.
    """

    def __init__(self, path: Path, timeout: timedelta, *, make: bool = True) -> None:
        super().__init__(timeout)
        self.path = path
        if make:
            with self._sentences():
                path.mkdir(_PRIVATE, parents=True, exist_ok=True)

    @classmethod
    def address_of(cls, world: WorldConfig) -> str:
        return str(Path(world.file_store_path).absolute()) if world.file_store_path else ""

    @classmethod
    def at(cls, address: str, space: str, timeout: timedelta, *, make: bool) -> Self:
        if not Path(address).is_dir():  # not made here: a mistyped one would wait for no machine
            raise ConfigError(
                flag="file_store_path",
                value=address,
                rule="there is no such folder",
                remedy="create it where all machines see it",
            )
        return cls(Path(address, space), timeout, make=make)

    def erase(self) -> None:
        """Remove the folder, at once: a process that still writes there can't bring it back."""
        grave = self.path.with_name(_temporary_name())
        with suppress(FileNotFoundError):
            os.rename(self.path, grave)
        shutil.rmtree(grave, ignore_errors=True)

    def tidy(self) -> None:
        """Remove halves of entries, and the folder if it is empty; one in use stays."""
        for half in self.path.glob("tmp=*"):
            shutil.rmtree(half, ignore_errors=True)
        with suppress(OSError):  # not empty: a new start of the run is already here
            self.path.rmdir()

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._sentences():
            return [self._value(key)[1] for key in keys]

    def missing(self, keys: Sequence[str]) -> list[str]:
        with self._sentences():
            names = set(_fresh_names(self.path))
            return [key for key in keys if _key_name(key) not in names]

    def set(self, key: str, value: str | bytes) -> None:
        data = as_bytes(value)
        self.change(key, lambda old: data)

    def delete_key(self, key: str) -> bool:
        with self._sentences():
            grave = self.path / _temporary_name()
            try:
                os.rename(self.path / _key_name(key), grave)
            except FileNotFoundError:
                return False
            shutil.rmtree(grave, ignore_errors=True)
            return True

    def num_keys(self) -> int:
        with self._sentences():
            return sum(name.startswith("key=") for name in _fresh_names(self.path))

    def clone(self) -> Self:
        return type(self)(self.path, timedelta(seconds=self.limit), make=False)

    def change(
        self, key: str, change: Callable[[bytes | None], bytes | None], absent: bytes = b""
    ) -> bytes:
        deadline = time.monotonic() + self.limit
        with self._sentences():
            while True:
                head, old = self._value(key)
                new = change(old)
                if new is None or new is old:
                    return absent if new is None else new
                if self._create(key, new) if head is None else self._replace(key, head, new):
                    return new
                if time.monotonic() > deadline:
                    raise DistStoreError(f"{key}: others changed it for {self.limit:g} s.")
                time.sleep(random.uniform(0, 0.002))

    def _value(self, key: str) -> tuple[str | None, bytes | None]:
        """Return the head's name and the value, or None and None where there is no key."""
        folder = self.path / _key_name(key)
        deadline = time.monotonic() + self.limit
        while time.monotonic() <= deadline:
            if folder.name not in _fresh_names(self.path):
                return None, None
            heads = [name for name in _fresh_names(folder) if name.startswith("head=")]
            try:
                if heads:  # a listing in the middle of a rename may show no head, or two
                    head = max(heads)
                    return head, (folder / head.rpartition("=")[2]).read_bytes()
            except OSError as error:
                if error.errno not in _GONE:
                    raise
        raise DistStoreError(f"{folder} names no value: remove it, it is damaged.")

    def _create(self, key: str, value: bytes) -> bool:
        folder = self.path / _temporary_name()
        unique = uuid.uuid4().hex
        try:
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

    def _replace(self, key: str, head: str, value: bytes) -> bool:
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
    def _sentences(self) -> Iterator[None]:
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
    try:
        os.utime(folder)
        return os.listdir(folder)
    except OSError as error:
        if error.errno in _GONE:
            return []
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
