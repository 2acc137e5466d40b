"""The table of stores in which processes rendezvous, and the address of one.

A `StoreSpec` is the address in words. A supervisor opens the store, gives the spec to its workers
as text, and they open the same store. Each run has a space of its own in it, and each start of a
run one inside that:

    folder   <file_store_path>/paceline-<run_id>/<start>/
    redis    the hash paceline-<run_id>/<start>
    etcd     keys that begin with paceline-<run_id>/<start>/
    tcp      keys that begin with paceline-<run_id>/<start>/

A new kind of store is a class in a file here, like `RedisStore`, a row of `STORES`, and its address
by the options, in `StoreSpec.of`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Self
from urllib.parse import quote

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from paceline.cluster.json_record import JsonRecord
from paceline.cluster.stores.etcd_address import EtcdAddress
from paceline.cluster.stores.etcd_store import EtcdStore
from paceline.cluster.stores.folder_store import FolderStore
from paceline.cluster.stores.polled_store import PolledStore
from paceline.cluster.stores.redis_store import RedisStore
from paceline.cluster.stores.sealed_store import SealedStore
from paceline.cluster.stores.tcp_store import TcpStore, split_address
from paceline.config.world import WorldConfig
from paceline.errors import CommError, ConfigError

STORES: dict[str, type[PolledStore]] = {
    "redis": RedisStore,
    "etcd": EtcdStore,
    "folder": FolderStore,
    "tcp": TcpStore,
}
"""The kinds of stores."""

STORE_ERRORS = (DistError, CommError, ConfigError)
"""What an operation on a store raises: its server or folder failed, or refused, or was too slow."""

_ERASE = timedelta(seconds=5)


@dataclass(frozen=True, kw_only=True)
class StoreSpec(JsonRecord):
    """Store specification: the kind and address of a store, and a key prefix in it.

    Attributes:
        kind: the key of the store's class in `STORES`.
        address: a folder's path, a Redis URL, `EtcdAddress.text`, or HOST:PORT. Omitted
            from the `repr`, because it may hold a password.
        space: prefix of all keys, as a path of names; "" for the whole store.
        secret: the run's secret, with which values are encrypted; "" for plain values.
    """

    kind: str
    address: str = field(repr=False)
    space: str = ""
    secret: str = field(default="", repr=False)

    @classmethod
    def of(cls, world: WorldConfig, space: str, secret: str = "") -> Self | None:
        """Return the store that the options give; None if they give none.

        Raises:
            ConfigError: `--master` isn't HOST:PORT, or `--etcd` can't be read.
        """
        host = f"redis://{world.redis_host}:{world.redis_port}/0" if world.redis_host else ""
        folder = str(Path(world.file_store_path).absolute()) if world.file_store_path else ""
        if world.master:
            split_address(world.master, "--master")
        # Redis before the folder: Caffe2's clusters give both, and rendezvous through Redis.
        addresses = {
            "redis": world.redis_url or host,
            "etcd": EtcdAddress.of(world.etcd).text if world.etcd else "",
            "folder": folder,
            "tcp": world.master,
        }
        for kind, address in addresses.items():
            if address:
                return cls(kind=kind, address=address, space=space, secret=secret)
        return None

    @property
    def served_by_run(self) -> bool:
        """Whether a process of the run serves the store, which ends with it."""
        return STORES[self.kind].served_by_run

    def subspace(self, name: str) -> Self:
        """Return the space `name` inside this one."""
        return replace(self, space=f"{self.space}/{name}" if self.space else name)


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
    store = STORES[spec.kind](spec.address, spec.space, timeout, make=make)
    return SealedStore(store, spec.secret) if spec.secret else store


def erase(spec: StoreSpec) -> None:
    """Remove the space of a start, and what is left of its run's if that holds no key.

    A TCP store's spaces end with its server.
    """
    if not spec.served_by_run:
        store = STORES[spec.kind](spec.address, spec.space, _ERASE)
        store.erase()
        store.close()


def first_line(error: Exception) -> str:
    """Return what a store's error says in its first line, without a stop."""
    return str(error).splitlines()[0].rstrip(".")


def peek(store: Store, key: str) -> bytes | None:
    """Return a key's value if it is there now."""
    if isinstance(store, PolledStore):
        return store.read([key])[0]
    return store.get(key) if store.check([key]) else None
