"""A run's records and sockets: which are believed, and what is refused."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.active_run.stop import describe
from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.supervision.requests import run_socket
from paceline.cluster.supervision.requests.member_record import (
    MemberRecord,
    RunProcesses,
    read_records,
    remove_records_of_machine,
)
from paceline.cluster.supervision.requests.run_presence import RunPresence
from paceline.cluster.supervision.requests.run_requests import (
    StopResult,
    ask,
    ask_status,
    first_asked,
)
from paceline.cluster.supervision.requests.run_socket import Answer, Request, RunSocket
from paceline.cluster.supervision.requests.run_status import MemberLoss, MemberStatus, RunStatus
from paceline.errors import CommError

HERE = ProcessIdentity.of_this_process()
FAR = replace(HERE, kernel="another machine's boot", host="far")
STATUS = RunStatus(
    generation=3,
    step=120,
    samples_per_second=51.5,
    members=(MemberStatus(id="a-0", rank=0, role="worker", machine=0, host="here", pid=7),),
    losses=(MemberLoss(member="a-1", generation=2, cause="rank 1 was killed.", seconds=1.25),),
)


class Handler:
    """What obeys a run's requests."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def stop(self) -> None:
        self.stopped.set()

    def status(self) -> RunStatus:
        return STATUS


class Presence(RunPresence):
    """This process's presence in a run, which a request to stop doesn't end."""

    stopped: Callable[[], object]

    def stop(self) -> None:
        self.stopped()


def record(name: str = "a-0", process: ProcessIdentity = HERE, **changes: object) -> MemberRecord:
    values = {"role": "worker", "machine": 0, "socket": "none"}
    return MemberRecord(id=name, process=process, **(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def presence(tmp_path: Path) -> Iterator[Callable[..., RunPresence]]:
    made: list[RunPresence] = []

    def make(
        report: Callable[[], RunStatus] = lambda: STATUS, stop: Callable[[], object] = lambda: None
    ) -> RunPresence:
        own = Presence(tmp_path, id="a-0", role="worker", machine=0, report=report)
        own.stopped = stop
        made.append(own)
        return own

    yield make
    for each in made:
        each.close()


def test_a_folder_that_is_removed_with_its_last_record_is_read_as_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record().write(tmp_path)

    def removed_before(read: Callable[[Path], object]) -> Callable[[Path], object]:
        def removed(path: Path) -> object:
            record().remove(tmp_path)
            return read(path)

        return removed

    for name in ("listdir", "scandir"):  # whichever is used
        monkeypatch.setattr(os, name, removed_before(getattr(os, name)))
    assert list(read_records(tmp_path)) == []
    assert not (tmp_path / "members").exists()


def test_a_status_arrives_as_it_was_reported(
    presence: Callable[..., RunPresence], tmp_path: Path
) -> None:
    presence()
    answered = ask_status(tmp_path)
    assert answered is not None
    status, answering = answered
    assert status == STATUS
    assert answering.process == HERE


def test_a_request_to_stop_calls_the_hook(
    presence: Callable[..., RunPresence], tmp_path: Path
) -> None:
    stopped = threading.Event()
    presence(stop=stopped.set)
    (found,) = read_records(tmp_path)
    ask(found, Request(kind="stop"))
    assert stopped.wait(10)


def test_a_process_without_an_answer_says_why_and_answers_the_next(
    presence: Callable[..., RunPresence], tmp_path: Path
) -> None:
    reports = iter([ValueError("no generation yet"), STATUS])

    def report() -> RunStatus:
        match next(reports):
            case RunStatus() as status:
                return status
            case error:
                raise error

    presence(report=report)
    (found,) = read_records(tmp_path)
    with pytest.raises(CommError, match="no generation yet"):
        ask(found, Request(kind="status"))
    assert ask_status(tmp_path) is not None


def test_another_users_request_is_refused(
    presence: Callable[..., RunPresence], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()
    presence(stop=stopped.set)
    (found,) = read_records(tmp_path)
    monkeypatch.setattr(run_socket.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CommError, match="belongs to another user"):
        ask(found, Request(kind="stop"))
    assert not stopped.is_set()


def test_an_answer_is_on_the_way_before_the_process_stops(
    presence: Callable[..., RunPresence], tmp_path: Path
) -> None:
    answered = threading.Event()
    presence(stop=lambda: order.append("stopped" if answered.wait(10) else "unanswered"))
    (found,), order = read_records(tmp_path), list[str]()
    ask(found, Request(kind="stop"))
    answered.set()
    while not order:
        assert ask_status(tmp_path) is not None  # the thread is done with the first request
    assert order == ["stopped"]


def test_a_process_that_ends_before_it_answers_is_an_error_of_the_connection() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"paceline-{os.getpid()}"
        listener.bind(f"\0{name}")
        listener.listen()
        thread = threading.Thread(target=lambda: listener.accept()[0].close())
        thread.start()
        with pytest.raises(ConnectionError):
            ask(record(socket=name), Request(kind="stop"))
        thread.join()


def test_a_socket_of_another_process_is_not_asked(tmp_path: Path) -> None:
    handler = Handler()
    with closing(RunSocket(handler)) as made:
        other = record(process=replace(HERE, pid=os.getppid()), socket=made.name)
        with pytest.raises(ConnectionRefusedError, match="another process's"):
            ask(other, Request(kind="stop"))
    assert not handler.stopped.is_set()


@pytest.mark.parametrize("sent", [b"nonsense", b'{"kind": "dance"}', b"x" * 10_000])
def test_nonsense_is_answered_with_an_error(sent: bytes) -> None:
    with closing(RunSocket(Handler())) as made:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(f"\0{made.name}")
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            answer = client.recv(10_000)
        assert b'"error": ""' not in answer
        assert b'"error"' in answer
        assert ask(record(socket=made.name), Request(kind="status")).status


class Occupied(Handler):
    """A handler that the first client occupies until a test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.free = threading.Event(), threading.Event()

    def status(self) -> RunStatus:
        self.asked.set()
        assert self.free.wait(10)
        return STATUS


def test_a_silent_client_delays_the_next_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both come while another one is answered, and the second has sent its request by then."""
    handler = Occupied()
    with closing(RunSocket(handler)) as made, ExitStack() as stack:

        def client(request: bytes) -> socket.socket:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(10)
            connection.connect(f"\0{made.name}")
            if request:
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
            return connection

        asks = Request(kind="status").to_text().encode()
        client(asks)
        assert handler.asked.wait(10)
        monkeypatch.setattr(run_socket, "CLIENT_S", 0.1)
        silent, second = client(b""), client(asks)
        handler.free.set()
        assert silent.recv(1) == b""
        assert Answer.from_text(second.recv(10_000)).status == STATUS.to_text()


def test_a_closed_socket_refuses_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())  # perhaps with a thread of an earlier test
    made = RunSocket(Handler())
    made.close()
    assert not set(threading.enumerate()) - before
    with pytest.raises(ConnectionRefusedError):
        ask(record(socket=made.name), Request(kind="status"))


def test_a_forked_child_doesnt_hold_the_socket() -> None:
    def sockets() -> list[str]:
        files = (os.readlink(entry.path) for entry in os.scandir("/proc/self/fd"))
        return [file for file in files if file.startswith("socket:")]

    before = set(sockets())
    with closing(RunSocket(Handler())):
        (own,) = set(sockets()) - before  # a child may close others, which earlier tests have left
        child = os.fork()
        if not child:
            os._exit(own in sockets())
        assert os.waitpid(child, 0)[1] == 0


def test_records_are_believed_as_far_as_the_kernel_confirms_them(tmp_path: Path) -> None:
    runs, ended = record("a-0"), record("a-1", replace(HERE, started=HERE.started - 1))
    far = record("a-2", FAR)
    for each in (runs, ended, far):
        each.write(tmp_path)
    (tmp_path / "members" / "damaged.json").write_text("{")
    found = RunProcesses.of(tmp_path)
    assert (found.here, found.ended, found.elsewhere) == ((runs,), (ended,), (far,))


def test_the_last_record_takes_the_folder_with_it(tmp_path: Path) -> None:
    first, second = record("a-0"), record("a-1")
    first.write(tmp_path)
    second.write(tmp_path)
    first.remove(tmp_path)
    assert list(read_records(tmp_path)) == [second]
    second.remove(tmp_path)
    assert not (tmp_path / "members").exists()


def test_a_machines_start_removes_its_own_records_only(tmp_path: Path) -> None:
    own, other = record("a-0"), record("a-1", FAR, machine=1)
    own.write(tmp_path)
    other.write(tmp_path)
    remove_records_of_machine(tmp_path, 0)
    assert list(read_records(tmp_path)) == [other]


def test_workers_are_asked_where_their_machine_has_no_supervisor() -> None:
    supervisor = record("supervisor-0", role="supervisor")
    supervised, orphan = record("a-0"), record("a-1", machine=1)
    assert list(first_asked([supervised, orphan, supervisor])) == [orphan, supervisor]


@pytest.mark.parametrize(
    ("result", "lines"),
    [
        (
            StopResult(ended=(record(),), running=(), elsewhere=(record(process=FAR),)),
            [
                "run r is stopped: 1 process on this machine ended.",
                "Its processes on far end with them.",
            ],
        ),
        (
            StopResult(ended=(), running=(record(),), elsewhere=(), refused=("a: not permitted",)),
            [
                "a: not permitted",
                "run r isn't stopped: 1 process on this machine still running; repeat the command, "
                f"or end it with kill -9 {HERE.pid}.",
            ],
        ),
        (
            StopResult(ended=(), running=(), elsewhere=(record(process=FAR),)),
            [
                "run r has no process on this machine; the last known ones are on far: repeat the "
                "command there."
            ],
        ),
    ],
)
def test_the_result_of_a_stop_is_said(result: StopResult, lines: list[str]) -> None:
    assert describe(Path("runs/r"), result, 30.0) == lines
