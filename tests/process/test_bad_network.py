"""Meeting places that aren't there, refuse, answer nonsense, or go away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis import Redis

from tests.harness.data.permissions import read_only
from tests.harness.network.ports import free_port
from tests.harness.network.redis_server import redis_server
from tests.harness.processes.bad_inputs import (
    LIMIT,
    NULL,
    Bad,
    no_process_left,
    require_answer,
    require_message,
    write_model,
)
from tests.harness.processes.command import Command

WORDS = f"{NULL} --model own:net --num_shards 2 --run_id r --first_iter_timeout 1 "
SECOND = WORDS + "--shard_id 1 "
CHECK = "check that it runs there and that this machine may connect."
NOT_COME = (
    r"machine {} of 2{} didn't come within 1 s: start it with --run_id r and the same "
    "rendezvous, or give a longer --first_iter_timeout."
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meet").mkdir()
    return write_model(tmp_path, monkeypatch)


@contextmanager
def server(answer: bytes) -> Iterator[int]:
    """Listen at a free port and answer whatever comes with the same bytes; yields the port."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed: the test is over
                return
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_taken_port_is_named(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with server(b"") as port:
        message = (
            rf"--master: port {port} can't be opened on this machine \(Address already in use\): "
            "another run may be using it; choose another port."
        )
        words = f"{WORDS} --master 127.0.0.1:{port}"
        require_answer(Bad(command=words, message=message), here, capfd)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_somebody_else_at_machine_0s_port_isnt_believed(
    answer: bytes, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with server(answer) as port:
        reason = rf" \(127.0.0.1:{port} can't be reached: no store answers there\)"
        words = f"{SECOND} --master 127.0.0.1:{port}"
        message = NOT_COME.format(0, reason)
        require_answer(Bad(command=words, message=message, status=1), here, capfd)


def test_nobody_at_machine_0s_port_is_waited_for(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    reason = rf" \(127.0.0.1:{port} can't be reached: Connection refused\)"
    words = f"{SECOND} --master 127.0.0.1:{port}"
    require_answer(Bad(command=words, message=NOT_COME.format(0, reason), status=1), here, capfd)


MASTERS = {
    "nowhere.invalid:29500": "nowhere.invalid:29500: the name nowhere.invalid can't be resolved on "
    "this machine; give an address, or a name that it can resolve.",
    "node0": "--master node0: give it as HOST:PORT, such as node0:29500.",
    "node0:99999": "--master node0:99999: give it as HOST:PORT, such as node0:29500.",
}


@pytest.mark.parametrize("master", MASTERS)
def test_a_master_that_cant_be_is_refused(
    master: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = Bad(command=f"{SECOND} --master {master}", message=MASTERS[master])
    require_answer(bad, here, capfd)


def test_a_redis_server_that_isnt_there_is_named(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    message = rf"The Redis server at 127.0.0.1:{port} can't be reached \(.*refused\): {CHECK}"
    words = f"{WORDS} --redis_host 127.0.0.1 --redis_port {port}"
    require_answer(Bad(command=words, message=message, status=1), here, capfd)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 99 + b"\r\n", b""])
def test_what_isnt_redis_is_named(
    answer: bytes, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with server(answer) as port:
        message = rf"The Redis server at 127.0.0.1:{port} can't be reached \(.*\): {CHECK}"
        words = f"{WORDS} --redis_host 127.0.0.1 --redis_port {port}"
        require_answer(Bad(command=words, message=message, status=1), here, capfd)


def test_a_redis_server_that_refuses_the_password_is_told_without_the_password(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with redis_server("secret") as url:
        at = f"127.0.0.1:{urlsplit(url).port}"
        message = (
            rf"The Redis server at {at} refused the user or the password: give them as --redis_url "
            r"redis://USER:PASSWORD@HOST:PORT/0 \(the user may be empty\)."
        )
        for place in (f"--redis_url redis://:wrong@{at}/0", f"--redis_url redis://{at}/0"):
            require_answer(Bad(command=WORDS + place, message=message), here, capfd)


def test_a_redis_server_that_goes_during_the_start_is_told(here: Path) -> None:
    with redis_server() as url, no_process_left() as environment:
        words = f"{NULL} --num_shards 2 --run_id r --redis_url {url}".split()
        command = Command(*words, folder=here, environment=environment)
        command.line_with("waiting for machine 1 of 2")
        stop_redis(url)
        message = (
            rf"The Redis server at 127.0.0.1:{urlsplit(url).port} can't be reached \(.*\): {CHECK}"
        )
        require_message(command.wait(LIMIT), 1, message)
    assert not (here / "runs").exists()


def stop_redis(url: str) -> None:
    with Redis.from_url(url) as client:
        client.shutdown(nosave=True)


@pytest.mark.parametrize("folder", ["nowhere", "own.py"])
def test_a_shared_folder_that_isnt_is_refused(
    folder: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in (WORDS, SECOND):
        message = (
            rf"--file_store_path \S+/{folder}: there is no such folder; create it where all "
            "machines can access it."
        )
        bad = Bad(command=f"{words} --file_store_path {folder}", message=message)
        require_answer(bad, here, capfd)


def test_a_shared_folder_that_may_not_be_written_is_refused(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = (
        r"The shared folder \S+/meet/paceline-r: Permission denied; give a folder that this user "
        "can write on all machines."
    )
    with read_only(here / "meet"):
        bad = Bad(command=f"{WORDS} --file_store_path meet", message=message)
        require_answer(bad, here, capfd)


def test_a_machine_that_doesnt_come_is_named(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words, machine in ((WORDS, 1), (SECOND, 0)):
        message = NOT_COME.format(machine, "")
        bad = Bad(command=f"{words} --file_store_path meet", message=message, status=1)
        require_answer(bad, here, capfd)


def test_an_interface_that_isnt_there_is_refused(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = (
        "--distributed_interfaces eth77: this machine has no such interface with an address; "
        r"it has .*lo.*\."
    )
    words = f"{WORDS} --file_store_path meet --distributed_interfaces eth77"
    require_answer(Bad(command=words, message=message), here, capfd)
