"""A store of each kind, and several real processes that use one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from paceline.cluster.stores.store_spec import StoreSpec, open_store
from paceline.cluster.stores.tcp_store import serve_tcp
from tests.harness.network.etcd_server import etcd_server
from tests.harness.network.redis_server import redis_server

LIMIT = timedelta(seconds=30)


@contextmanager
def store_of(kind: str, folder: Path) -> Iterator[StoreSpec]:
    """Make a store of a kind inside the block; yields a space in it."""
    if kind == "folder":
        (folder / "run" / "inner").mkdir(parents=True)
        yield StoreSpec(kind="folder", address=str(folder), space="run")
    elif kind == "redis":
        with redis_server() as url:
            yield StoreSpec(kind="redis", address=url, space="run")
    elif kind == "etcd":
        with etcd_server(folder) as endpoint:
            yield StoreSpec(kind="etcd", address=f"http://{endpoint}", space="run")
    else:
        server = serve_tcp("127.0.0.1", 0, LIMIT)
        secret = "open sesame" if kind == "sealed tcp" else ""
        address = f"127.0.0.1:{server.port}"
        yield StoreSpec(kind="tcp", address=address, space="run", secret=secret)


def on_processes(
    spec: StoreSpec, count: int, function: Callable[[Store, int, int], Any]
) -> list[Any]:
    """Call `function(store, number, count)` on several processes that began together."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        calls = [pool.submit(_call, spec, number, count, function) for number in range(count)]
        return [call.result(timeout=60) for call in calls]


def _call(
    spec: StoreSpec, number: int, count: int, function: Callable[[Store, int, int], Any]
) -> Any:
    store = open_store(spec, LIMIT)
    store.set(f"here/{number}", "")
    store.wait([f"here/{other}" for other in range(count)])
    return function(store, number, count)
