"""What a process without the run's secret can do in a store, with torch's own client."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from stat import S_IMODE

import pytest
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline.cluster.rendezvous.registration import RegisteredWorld
from paceline.cluster.stores import tcp_store
from paceline.cluster.stores.failure_report import FAILURE, FailureReport
from paceline.cluster.stores.store_spec import StoreSpec, open_store, peek
from paceline.cluster.stores.tcp_store import serve_tcp
from paceline.errors import CommError, ConfigError

LIMIT = timedelta(seconds=5)
WORLD = RegisteredWorld(token="0123456789abcdef", registrations=())
UNSEALED = "written without this run's secret: give all machines the same PACELINE_SECRET"


@pytest.fixture
def server() -> TCPStore:
    return serve_tcp("127.0.0.1", 0, LIMIT)


@pytest.fixture
def spec(server: TCPStore) -> StoreSpec:
    address = f"127.0.0.1:{server.port}"
    return StoreSpec(kind="tcp", address=address, space="run", secret="open sesame")


@pytest.fixture
def outside(server: TCPStore) -> Store:
    """The same space through torch's own client."""
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=LIMIT)
    return PrefixStore("run", client)


def test_the_job_token_is_not_in_the_store(spec: StoreSpec, outside: Store) -> None:
    open_store(spec, LIMIT).set("world", WORLD.to_text())
    assert WORLD.token.encode() not in outside.get("world")
    assert b"token" not in outside.get("world")
    assert RegisteredWorld.from_text(open_store(spec, LIMIT).get("world")) == WORLD


def test_a_failure_report_of_an_outsider_is_not_read(spec: StoreSpec, outside: Store) -> None:
    outside.set(FAILURE, FailureReport(text="the end.", status=1).to_text())
    with pytest.raises(ConfigError, match=UNSEALED):
        peek(open_store(spec, LIMIT), FAILURE)


def test_a_sealed_value_counts_under_its_own_key_alone(spec: StoreSpec, outside: Store) -> None:
    store = open_store(spec, LIMIT)
    store.set("machine/0", "value")
    outside.set("machine/1", outside.get("machine/0").decode("latin-1"))
    outside.compare_set("machine/2", "", "")
    for key in ("machine/1", "machine/2"):
        with pytest.raises(ConfigError, match=UNSEALED):
            store.get(key)
    assert store.get("machine/0") == b"value"


@pytest.mark.parametrize("secret", ["", "open barley"])
def test_another_secret_or_none_reads_nothing(spec: StoreSpec, secret: str) -> None:
    open_store(spec, LIMIT).set("world", WORLD.to_text())
    other = StoreSpec(kind="tcp", address=spec.address, space="run", secret=secret)
    with pytest.raises((ConfigError, CommError), match=r"same (version|PACELINE_SECRET).*secret"):
        RegisteredWorld.from_text(open_store(other, LIMIT).get("world"))


def test_a_report_in_the_store_never_has_status_0() -> None:
    good = FailureReport(text="all is well.", status=0)
    assert FailureReport.from_text(good.to_text()).status == 1
    assert FailureReport.from_text('{"text": "all is well.", "status": "0"}').status == 1
    assert FailureReport.from_text('{"text": "all is well.", "status": 256}').status == 1
    with pytest.raises(CommError, match="can't be read"):
        FailureReport.from_text("garbage")


def test_only_this_user_may_read_a_shared_folders_values(tmp_path: Path) -> None:
    spec = StoreSpec(kind="folder", address=str(tmp_path), space="run/start")
    store = open_store(spec, LIMIT, make=True)
    store.set("world", WORLD.to_text())
    (entry,) = (tmp_path / "run/start").iterdir()
    assert [S_IMODE(path.stat().st_mode) for path in (entry.parent, entry)] == [0o700, 0o700]


def serve(ready: Connection) -> None:
    store = serve_tcp("127.0.0.1", 0, LIMIT)
    ready.send(store.port)
    signal.pause()


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, int]]:
    """A client of a server whose process is stopped, and that process."""
    monkeypatch.setattr(tcp_store, "_ANSWER_S", 0.2)
    ready, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("forkserver").Process(target=serve, args=(sender,))
    process.start()
    assert ready.poll(100)
    store = open_store(StoreSpec(kind="tcp", address=f"127.0.0.1:{ready.recv()}"), LIMIT)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    yield store, process.pid
    process.kill()
    process.join()


CALLS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("k"),
    "set": lambda store: store.set("k", "1"),
    "add": lambda store: store.add("k", 1),
    "append": lambda store: store.append("k", b"1"),  # type: ignore[attr-defined]
    "check": lambda store: store.check(["k"]),
    "wait": lambda store: store.wait(["k"], LIMIT),
    "compare_set": lambda store: store.compare_set("k", "", "1"),
    "delete_key": lambda store: store.delete_key("k"),
}


@pytest.mark.timeout(20, func_only=True)  # the server's process may take as long to start
def test_no_call_waits_for_a_stopped_server(stopped: tuple[Store, int]) -> None:
    store, server = stopped
    for call in CALLS.values():
        with pytest.raises(CommError, match=r"is lost: no answer within|can't be reached"):
            call(store)
    os.kill(server, signal.SIGCONT)
    store.set("k", "2")
    assert store.get("k") == b"2"
