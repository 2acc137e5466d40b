"""Where a run's members meet: a shared folder, a Redis server, or machine 0's TCP store.

A `StoreSpec` is the address in words. A supervisor opens the store, gives the spec to its workers
as text, and they open the same store. Each run has a space of its own in it, and each incarnation
of a run (a start of it) one inside that:

    folder   <file_store_path>/paceline-<run_id>/<incarnation>/
    redis    the hash paceline-<run_id>/<incarnation>
    tcp      keys that begin with paceline-<run_id>/<incarnation>/
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from paceline.cluster.stores.folder_store import FolderStore
from paceline.cluster.stores.polled_store import PolledStore
from paceline.cluster.stores.redis_store import RedisStore
from paceline.cluster.stores.tcp_store import connect_tcp, split_address
from paceline.errors import CommError, ConfigError

STORE_ERRORS = (DistError, CommError, ConfigError)
"""What an operation on a store raises: its server or folder failed, or refused, or was too slow."""


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """A store's address, and the space in it.

    Attributes:
        kind: which store.
        address: a folder's path, a Redis URL, or HOST:PORT. Not in the `repr`: a URL may hold a
            password.
        space: a path of names, "" for the whole store.
    """

    kind: Literal["folder", "redis", "tcp"]
    address: str = field(repr=False)
    space: str = ""

    def within(self, name: str) -> Self:
        """Return the space `name` inside this one."""
        return replace(self, space=f"{self.space}/{name}" if self.space else name)

    def to_text(self) -> str:
        """Return the spec as JSON; it may hold a password."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `to_text` wrote."""
        return cls(**json.loads(text))


def run_space(run_id: str) -> str:
    """Return the name of a run's space."""
    return f"paceline-{quote(run_id, safe='')}"


def open_store(spec: StoreSpec, timeout: timedelta, *, make: bool = False) -> Store:
    """Open a store.

    Keep the result for as long as anything uses it, a `PrefixStore` around it included.

    Args:
        spec: its address.
        timeout: the limit of its `get`, and of a `wait` that gives none.
        make: make a shared folder's space where it isn't there: machine 0 does, so that the others
            don't bring back what it has removed.

    Raises:
        ConfigError: the address, a password or permissions are wrong.
        CommError: the store can't be reached.
    """
    if spec.kind == "folder":
        if not Path(spec.address).is_dir():  # not made here: a mistyped one would wait for nobody
            raise ConfigError(
                f"--file_store_path {spec.address}: there is no such folder; create it where all "
                "machines see it."
            )
        return FolderStore(_folder(spec), timeout, make=make)
    if spec.kind == "redis":
        return RedisStore(spec.address, spec.space, timeout)
    store = connect_tcp(*split_address(spec.address), timeout)
    return PrefixStore(spec.space, store) if spec.space else store


def erase(spec: StoreSpec) -> None:
    """Remove a space and what is in it; a TCP store's goes with its server."""
    if spec.kind == "folder":
        folder = _folder(spec)
        grave = folder.with_name(f"tmp={uuid.uuid4().hex}")
        with suppress(FileNotFoundError):
            os.rename(folder, grave)  # at once: who still writes there mustn't bring it back
        shutil.rmtree(grave, ignore_errors=True)
    elif spec.kind == "redis":
        store = RedisStore(spec.address, spec.space, timedelta(seconds=5))
        store.erase()
        store.close()


def tidy(spec: StoreSpec) -> None:
    """Remove what is left of a space that holds no key; one that somebody else uses stays."""
    if spec.kind != "folder":
        return
    folder = _folder(spec)
    for half in folder.glob("tmp=*"):
        shutil.rmtree(half, ignore_errors=True)
    with suppress(OSError):  # not empty: a new start of the run is already here
        folder.rmdir()


def peek(store: Store, key: str) -> bytes | None:
    """Return a key's value if it is there now; a key of a TCP store must not be deleted then."""
    if isinstance(store, PolledStore):
        return store.read([key])[0]
    return store.get(key) if store.check([key]) else None


def _folder(spec: StoreSpec) -> Path:
    return Path(spec.address, spec.space)
