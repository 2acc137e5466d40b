"""Stores of each kind for a rendezvous, and the keys that a run leaves there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.store_spec import StoreSpec, run_space
from tests.harness.network.etcd_server import ALL_KEYS, ask, etcd_server
from tests.harness.network.ports import free_port
from tests.harness.network.redis_server import redis_server

SPACE = run_space("r")
KINDS = ("folder", "redis", "etcd", "tcp")


@contextmanager
def rendezvous_of(kind: str, parent: Path) -> Iterator[StoreSpec]:
    """Make the rendezvous of run r; machine 0 serves a TCP store itself."""
    if kind == "folder":
        path = parent / "meet"
        path.mkdir()
        yield StoreSpec(kind="folder", address=str(path), space=SPACE)
    elif kind == "redis":
        with redis_server() as url:
            yield StoreSpec(kind="redis", address=url, space=SPACE)
    elif kind == "etcd":
        with etcd_server(parent) as endpoint:
            yield StoreSpec(kind="etcd", address=f"http://{endpoint}", space=SPACE)
    else:
        yield StoreSpec(kind="tcp", address=f"127.0.0.1:{free_port()}", space=SPACE)


def plan(rendezvous: StoreSpec, machine: int, machines: int = 2, **changes: object) -> RunPlan:
    """A machine's part in run r, with short limits."""
    values = {"run_id": "r", "first_iter_timeout": 20.0, "timeout": 5.0}
    return RunPlan(machine=machine, machines=machines, rendezvous=rendezvous, **(values | changes))  # type: ignore[arg-type]


def left_behind(rendezvous: StoreSpec) -> list[object]:
    """List what is in the rendezvous; a TCP store goes with its server."""
    if rendezvous.kind == "folder":
        return list(os.listdir(rendezvous.address))
    if rendezvous.kind == "redis":
        client = redis.Redis.from_url(rendezvous.address)
        keys = list(client.scan_iter())
        client.close()
        return keys
    if rendezvous.kind == "etcd":
        endpoint = rendezvous.address.removeprefix("http://")
        return list(ask(endpoint, "kv/range", **ALL_KEYS).get("kvs", []))
    return []
