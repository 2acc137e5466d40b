"""What the stores' servers say to the caller's mistakes and to the world's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import redis

from paceline.cluster.stores import tcp_store
from paceline.cluster.stores.redis_store import RedisStore
from paceline.cluster.stores.store_spec import StoreSpec, erase, open_store
from paceline.cluster.stores.tcp_store import TcpStore, serve_tcp, split_address
from paceline.errors import CommError, ConfigError
from tests.harness.network.ports import free_port
from tests.harness.network.redis_server import redis_server

LIMIT = timedelta(seconds=5)
SECRET = "open-sesame"


@pytest.fixture
def url() -> Iterator[str]:
    with redis_server(SECRET) as made:
        yield made


@pytest.fixture
def closed_port() -> int:
    return free_port()


def test_a_redis_password_is_used(url: str) -> None:
    store = RedisStore(url, "run", LIMIT)
    store.set("k", "value")
    assert store.get("k") == b"value"


@pytest.mark.parametrize("password", ["", ":wrong-secret@"])
def test_a_refused_password_is_the_callers_mistake_and_isnt_printed(
    url: str, password: str
) -> None:
    wrong = url.replace(f":{SECRET}@", password)
    with pytest.raises(ConfigError, match=r"127.0.0.1:\d+ refused the user or the pass") as caught:
        RedisStore(wrong, "run", LIMIT)
    assert caught.value.status == 2
    assert "wrong-secret" not in str(caught.value)
    assert caught.value.__suppress_context__  # redis-py's error isn't printed beside it


def test_a_redis_server_that_isnt_there_is_a_sentence(closed_port: int) -> None:
    with pytest.raises(CommError, match=rf"127.0.0.1:{closed_port} can't be reached.*check"):
        RedisStore(f"redis://:{SECRET}@127.0.0.1:{closed_port}/0", "run", LIMIT)


def test_an_address_that_isnt_a_redis_url_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"--redis_url can't be read"):
        RedisStore("https://127.0.0.1", "run", LIMIT)


def test_every_write_lets_the_keys_live_an_hour_more_and_one_command_removes_them(
    url: str,
) -> None:
    spec = StoreSpec(kind="redis", address=url, space="run")
    store = open_store(spec, LIMIT)
    client = redis.Redis.from_url(url)
    writes = {
        "set": lambda: store.set("a", "1"),
        "add": lambda: store.add("n", 1),
        "compare_set": lambda: store.compare_set("a", "1", "2"),
        "append": lambda: store.append("a", b"3"),  # type: ignore[attr-defined]
    }
    for name, write in writes.items():
        write()
        assert 3000 < client.ttl("run") <= 3600, name  # type: ignore[operator]
        client.persist("run")
    erase(spec)
    assert client.keys("*") == []
    client.close()


def test_a_taken_port_is_the_callers_mistake() -> None:
    server = serve_tcp("127.0.0.1", 0, LIMIT)
    with pytest.raises(ConfigError, match=rf"port {server.port} can't be opened .*choose another"):
        serve_tcp("127.0.0.1", server.port, LIMIT)


def test_nobody_at_the_tcp_address_is_a_sentence(closed_port: int) -> None:
    with pytest.raises(CommError, match=rf"127.0.0.1:{closed_port} can't be reached: .*refused"):
        TcpStore(f"127.0.0.1:{closed_port}", "", LIMIT)


def test_an_unknown_name_is_the_callers_mistake() -> None:
    with pytest.raises(ConfigError, match=r"the name no-such-host.invalid can't be resolved"):
        TcpStore("no-such-host.invalid:29500", "", LIMIT)


@pytest.mark.parametrize("address", ["node0", "node0:", ":29500", "node0:port", "node0:70000"])
def test_a_tcp_address_needs_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match=r"give it as HOST:PORT"):
        split_address(address)


def test_host_and_port_are_read() -> None:
    assert split_address("node0:29500") == ("node0", 29500)


def test_folders_text_doesnt_matter_to_the_store(tmp_path: Path) -> None:
    folder = tmp_path / "a folder, with blanks"
    folder.mkdir()
    store = open_store(StoreSpec(kind="folder", address=str(folder), space="r/1"), LIMIT, make=True)
    store.set("k", "v")
    assert store.get("k") == b"v"


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_whoever_isnt_a_tcp_store_is_told_at_once_and_in_a_sentence(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tcp_store, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                if answer is not None:
                    connection.sendall(answer)
                else:
                    connection.recv(100)  # until the other goes

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(CommError, match="can't be reached: no store answers there"):
            TcpStore(f"127.0.0.1:{listener.getsockname()[1]}", "", LIMIT)
        thread.join()
    assert capfd.readouterr().err == ""
