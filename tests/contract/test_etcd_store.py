"""What a store on etcd does with leases, passwords, TLS, lost servers and lost answers."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from paceline.cluster.membership.witness import Witness, WitnessUnreachable
from paceline.cluster.stores import etcd_cluster, etcd_store
from paceline.cluster.stores.etcd_store import EtcdStore
from paceline.cluster.stores.store_spec import StoreSpec, erase, open_store
from paceline.errors import CommError, ConfigError
from tests.harness.network.deaf_proxy import deaf_proxy
from tests.harness.network.etcd_server import (
    ALL_KEYS,
    PASSWORD,
    USER,
    EtcdMember,
    ask,
    certificates,
    etcd_members,
    etcd_server,
    require_password,
)
from tests.harness.network.ports import free_port
from tests.harness.network.redis_server import redis_server

LIMIT = timedelta(seconds=10)
LOGIN = f"{USER}:open%2Fsesame%40"


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    with etcd_server(tmp_path) as made:
        yield made


def store_at(*endpoints: str, space: str = "paceline-r/1") -> EtcdStore:
    return EtcdStore(f"http://{','.join(endpoints)}", space, LIMIT)


def lease_of(endpoint: str) -> int:
    """The lease of all keys."""
    (lease,) = {int(each["lease"]) for each in ask(endpoint, "kv/range", **ALL_KEYS)["kvs"]}
    return lease


def test_all_keys_of_a_space_have_one_lease_and_end_with_it(endpoint: str) -> None:
    store, other = store_at(endpoint), store_at(endpoint)
    store.set("a", "1")
    other.add("n", 1)
    lease = lease_of(endpoint)
    assert int(ask(endpoint, "lease/timetolive", ID=lease)["grantedTTL"]) == 3600
    erase(StoreSpec(kind="etcd", address=f"http://{endpoint}", space="paceline-r/1"))
    assert "kvs" not in ask(endpoint, "kv/range", **ALL_KEYS)
    assert ask(endpoint, "lease/leases").get("leases", []) == []


def test_keys_of_a_killed_run_vanish(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "_TIME_TO_LIVE_S", 1)
    store_at(endpoint).set("a", "1")
    watch = {"create_request": {**ALL_KEYS, "filters": ["NOPUT"], "start_revision": 1}}
    url = f"http://{endpoint}/v3/watch"
    with urllib.request.urlopen(url, json.dumps(watch).encode(), timeout=20) as answer:
        lines = (json.loads(line)["result"] for line in answer)
        events = next(line["events"] for line in lines if "events" in line)
    assert {event["type"] for event in events} == {"DELETE"}
    assert "kvs" not in ask(endpoint, "kv/range", **ALL_KEYS)


def test_any_clients_write_renews_the_lease(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "_RENEW_S", 0.0)
    store, other = store_at(endpoint), store_at(endpoint)
    paths: list[str] = []
    real = other._cluster.ask
    monkeypatch.setattr(other._cluster, "ask", lambda path, r: paths.append(path) or real(path, r))
    store.set("a", "1")
    writes = {
        "set": lambda: other.set("b", "1"),
        "add": lambda: other.add("n", 1),
        "compare_set": lambda: other.compare_set("a", "1", "2"),
        "append": lambda: other.append("a", b"3"),
        "delete": lambda: other.delete_key("b"),
    }
    for name, write in writes.items():
        paths.clear()
        write()
        assert paths.count("lease/keepalive") == 1, name
        assert "lease/grant" not in paths


def test_a_store_whose_lease_ended_writes_with_a_new_one(endpoint: str) -> None:
    store = store_at(endpoint)
    store.set("a", "1")
    ask(endpoint, "lease/revoke", ID=lease_of(endpoint))
    assert not store.check(["a"])
    assert store.add("n", 2) == 2
    assert store.compare_set("a", "", "2") == b"2"
    assert lease_of(endpoint)


def test_the_last_key_that_is_deleted_leaves_nothing(endpoint: str) -> None:
    store, other, inner = store_at(endpoint), store_at(endpoint), store_at(endpoint, space="r/1/x")
    inner.set("k", "1")
    store.set("a", "1")
    other.set("b", "1")
    assert store.delete_key("a")
    assert other.get("b") == b"1"
    assert other.delete_key("b")
    assert inner.delete_key("k")
    assert "kvs" not in ask(endpoint, "kv/range", **ALL_KEYS)
    assert store.add("n", 1) == 1


def test_a_space_of_many_keys_is_read(endpoint: str) -> None:
    store = store_at(endpoint)
    names = [str(number) for number in range(250)]
    store.set("249", "last")
    assert store.read(names) == [None] * 249 + [b"last"]


def test_an_error_that_the_cluster_reports_is_a_sentence(endpoint: str) -> None:
    with pytest.raises(CommError, match=r"reported an error: request is too large\."):
        store_at(endpoint).set("big", b"x" * 1_700_000)


def test_the_users_password_is_used_and_a_lost_token_is_replaced(endpoint: str) -> None:
    require_password(endpoint)
    store = EtcdStore(f"http://{LOGIN}@{endpoint}", "paceline-r", LIMIT)
    store.set("k", "value")
    store._cluster._clients[0].session.headers["Authorization"] = "forgotten.1"
    assert store.add("n", 1) == 1
    assert store.get("k") == b"value"
    store.erase()
    assert not store.check(["k"])


@pytest.mark.parametrize(
    ("login", "space"),
    [("", "paceline-r"), (f"{USER}:wrong-secret@", "paceline-r"), (f"{LOGIN}@", "another")],
)
def test_a_refusal_is_the_callers_mistake_and_has_no_password(
    endpoint: str, login: str, space: str
) -> None:
    require_password(endpoint)
    said = rf"{endpoint} refused the user or the password \(.*\): give them as --etcd"
    with pytest.raises(ConfigError, match=said) as caught:
        EtcdStore(f"http://{login}{endpoint}", space, LIMIT)
    assert "wrong-secret" not in str(caught.value)
    assert PASSWORD not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_server_that_isnt_there_is_a_sentence() -> None:
    pytest.importorskip("etcd3gw")
    first, second = free_port(), free_port()
    with pytest.raises(CommError, match=rf"at 127.0.0.1:{first} can't be reached \(Connection re"):
        store_at(f"127.0.0.1:{first}")
    with pytest.raises(CommError, match=rf"No endpoint .* \(.*:{first}: Conn.*; .*:{second}: Conn"):
        store_at(f"127.0.0.1:{first}", f"127.0.0.1:{second}")


def test_a_server_of_another_kind_is_a_sentence(endpoint: str) -> None:
    with redis_server() as url:
        port = url.split(":")[-1].removesuffix("/0")
        with pytest.raises(CommError, match=r"can't be reached \(.*\): check that it runs"):
            store_at(f"127.0.0.1:{port}")
        assert store_at(f"127.0.0.1:{port}", endpoint).add("n", 1) == 1


def test_a_missing_client_package_is_the_callers_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd3gw", None)
    with pytest.raises(ConfigError, match=r"--etcd: .*isn't installed; run pip install 'paceline"):
        store_at("127.0.0.1:1")


def test_no_call_waits_for_a_stopped_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_cluster, "_ANSWER_S", 0.3)
    with etcd_members(tmp_path) as (member,):
        store = store_at(member.endpoint)
        assert member.process is not None
        os.kill(member.process.pid, signal.SIGSTOP)
        for call in (lambda: store.get("k"), lambda: store.set("k", "1"), store.erase):
            with pytest.raises(CommError, match=r"can't be reached \(.*timed out"):
                call()
        os.kill(member.process.pid, signal.SIGCONT)
        store.set("k", "2")
        assert store.get("k") == b"2"


@pytest.mark.parametrize("secret", ["", "open sesame"])
def test_a_write_whose_answer_is_lost_is_executed_once(endpoint: str, secret: str) -> None:
    with deaf_proxy(endpoint) as (deaf, loses):
        address = f"http://{deaf},{endpoint}"
        spec = StoreSpec(kind="etcd", address=address, space="run", secret=secret)
        calls = {
            "add": lambda store: store.add("n", 1),
            "append": lambda store: store.append("a", b"x"),
            "compare_set": lambda store: store.compare_set("c", "", "ours"),
            "delete": lambda store: store.delete_key("d"),
        }
        answers = {}
        for name, call in calls.items():
            loses.clear()
            store = open_store(spec, LIMIT)  # which asks the proxy first
            store.set("d", "1")
            loses.set()
            answers[name] = call(store)
        reader = open_store(
            StoreSpec(kind="etcd", address=f"http://{endpoint}", space="run", secret=secret), LIMIT
        )
        assert answers == {"add": 1, "append": None, "compare_set": b"ours", "delete": True}
        assert (reader.get("n"), reader.get("a"), reader.get("c")) == (b"1", b"x", b"ours")
        assert not reader.check(["d"])


def test_a_write_whose_only_server_is_lost_is_an_error(endpoint: str) -> None:
    with deaf_proxy(endpoint) as (deaf, loses):
        store = store_at(deaf)
        loses.set()
        with pytest.raises(CommError, match="can't be reached"):
            store.add("n", 1)


def survive(store: EtcdStore, member: EtcdMember) -> None:
    """Kill the member that the store asks; the store must answer as if nothing had happened."""
    before = store.add("n", 1)
    assert store._cluster._address.endpoints[store._cluster._first] == member.endpoint
    member.kill()
    assert store.get("n") == str(before).encode()
    assert store.add("n", 1) == before + 1


def test_a_cluster_of_three_loses_one_member_and_then_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with etcd_members(tmp_path, 3) as members:
        store = store_at(*(member.endpoint for member in members))
        witness = Witness(store, Witness.create(store), limit=30)
        assert witness.answer(lambda record: ("vote", record)) == ""
        survive(store, members[0])
        assert witness.answer(lambda record: ("more", record)) == "vote"
        members[1].kill()
        monkeypatch.setattr(etcd_cluster, "_ELECTION_S", 1.0)
        with pytest.raises(CommError, match=r"No endpoint .* check that most of its members run"):
            store.add("n", 1)
        members[1].start()
        members[1].await_ready()
        assert store.add("n", 0) in (2, 3)  # whether the lost request was executed is unknown


def test_a_killed_etcd_is_a_missing_vote_until_it_runs_again(tmp_path: Path) -> None:
    with etcd_members(tmp_path) as (member,):
        store = store_at(member.endpoint)
        witness = Witness(store, Witness.create(store), limit=10)
        witness.answer(lambda record: ("vote", None))
        member.kill()
        with pytest.raises(WitnessUnreachable, match=r"can't be reached .*its vote is missing"):
            witness.answer(lambda record: ("lost", None))
        member.start()
        member.await_ready()
        assert witness.answer(lambda record: (record, record)) == "vote"
        ask(member.endpoint, "kv/deleterange", **ALL_KEYS)
        with pytest.raises(WitnessUnreachable, match="it has lost the record"):
            witness.answer(lambda record: (record, record))


def test_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    files = certificates(tmp_path)
    settings = {"cacert": files["authority"], "cert": files["client"], "key": files["client_key"]}

    def address(*names: str, scheme: str = "https") -> str:
        query = "&".join(f"{name}={settings[name]}" for name in names)
        return f"{scheme}://{member.endpoint}" + (query and f"?{query}")

    with etcd_members(tmp_path, files=files) as (member,):
        store = EtcdStore(address("cacert", "cert", "key"), "run", LIMIT)
        store.set("k", "v")
        assert store.get("k") == b"v"
        with pytest.raises(CommError, match=r"\(.*certificate verify failed"):
            EtcdStore(address("cert", "key"), "run", LIMIT)
        with pytest.raises(CommError, match=r"can't be reached \("):
            EtcdStore(address("cacert"), "run", LIMIT)
        with pytest.raises(CommError, match=r"can't be reached \("):
            EtcdStore(address(scheme="http"), "run", LIMIT)
        settings["cacert"] = tmp_path / "none"
        with pytest.raises(
            ConfigError, match=r"--etcd …\?cacert=.*none: .*can't be read \(No such"
        ):
            EtcdStore(address("cacert"), "run", LIMIT)
