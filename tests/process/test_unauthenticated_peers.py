"""Unauthenticated peers at the control lines of a run in training: the run is unharmed."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path

from paceline.comm.handshake import FRAMES, DialerGreeting, Identity
from tests.harness.processes.fault_runs import LAST_KILL, LIMIT, FaultRun, proof_of
from tests.harness.processes.open_line import read_line
from tests.harness.processes.run_folders import wait_until

FLOOD, OPEN, ADMITTED, SLOW_BYTES = 1500, 100, 64, 40
NONSENSE = (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", bytes(1), os.urandom(1000))


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), LIMIT)


def read_to_end(connection: socket.socket) -> None:
    """Wait until the other side has closed a connection."""
    connection.settimeout(LIMIT)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass


def send_nonsense(port: int) -> None:
    for data in NONSENSE:
        with dial(port) as connection:
            connection.sendall(data)
            read_to_end(connection)


def test_a_run_in_training_is_unharmed_by_strangers_on_its_control_lines(tmp_path: Path) -> None:
    model = ("--model", "tests.harness.processes.open_line:open_line")
    run = FaultRun(tmp_path, "--sync", "notified", *model, machines=(2,))
    run.reach(LAST_KILL - 1)
    pid = run.pids[1]
    port, secret = read_line(tmp_path, pid)
    folder = f"/proc/{pid}/fd"
    before, most = len(os.listdir(folder)), 0
    (member,) = (path.stem for path in (run.run_folder / "members").glob("*-1.json"))
    with ExitStack() as stack:
        silent, slow = (stack.enter_context(dial(port)) for _ in range(2))
        hello = DialerGreeting(Identity(name="x", secret=b"t" * 32), member, FRAMES).hello
        send_nonsense(port)
        with dial(port) as other:
            other.sendall(hello)
            assert len(other.recv(64, socket.MSG_WAITALL)) == 64
            other.sendall(bytes(32))
            read_to_end(other)
        with dial(port) as first:
            greeting = DialerGreeting(Identity(name="x", secret=secret), member, FRAMES)
            first.sendall(greeting.hello)
            proof = greeting.feed(first.recv(64, socket.MSG_WAITALL))
            first.sendall(proof)
            assert first.recv(1) == b"\x01"
        with dial(port) as again:
            again.sendall(greeting.hello)
            assert len(again.recv(64, socket.MSG_WAITALL)) == 64
            again.sendall(proof)
            read_to_end(again)
        for number in range(FLOOD):
            connection = dial(port)
            if number < SLOW_BYTES:
                slow.send(hello[number : number + 1])
            if number < OPEN:
                stack.enter_context(connection)
            else:
                connection.close()
            most = max(most, len(os.listdir(folder)))
        read_to_end(silent)  # the oldest ones are closed first
    assert most - before <= ADMITTED + 2
    wait_until(lambda: len(os.listdir(folder)) <= before, LIMIT)
    run.release()
    ended = run.wait()
    assert ended.status == 0, ended.text
    assert "expelled" not in ended.text
    proof_of_run = proof_of(run.run_folder)
    assert proof_of_run.exact, proof_of_run.faults
    assert proof_of_run.done == proof_of_run.extent.steps * proof_of_run.extent.epochs
    assert run.completed() == [0, 1]
