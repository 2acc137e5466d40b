"""The end of a communicator: nobody is left waiting, and no thread outlives it."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from datetime import timedelta
from threading import Event
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import HashStore

from paceline.comm import process_group
from paceline.comm.communicator import Communicator, broadcast_all, gather_counts, total
from paceline.comm.gloo_loops import stop_listening
from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.comm.single_rank import SingleRankCommunicator
from paceline.errors import CommError, PeerLost
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.processes.gloo_processes import LIMIT, spawn


def sum_and_end(c: Communicator) -> tuple[float, int]:
    """Return a sum, and how many threads ended with the communicator.

    The kernel still counts a thread for a moment after it was joined.
    """
    result = float(total(c, torch.ones(1000), "a sum")[-1])
    process = psutil.Process()
    threads = process.num_threads()
    c.close()
    deadline = time.monotonic() + LIMIT / 2
    while process.num_threads() >= threads and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return result, threads - process.num_threads()


def test_gloos_threads_end_with_it() -> None:
    for result, ended in spawn(3, sum_and_end):
        assert result == 3
        assert ended > 0


def connect_to_own_ports(c: Communicator) -> tuple[int, int, float]:
    """Connect 1,500 times where this rank's connections end; count what was accepted, and kept."""
    process = psutil.Process()
    ours = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
    ports = sorted({one.laddr.port for one in ours})
    before, accepted = process.num_fds(), 0
    for number in range(1500):
        address = ("127.0.0.1", ports[number % len(ports)])
        with suppress(ConnectionRefusedError):
            socket.create_connection(address, LIMIT, source_address=("127.0.0.2", 0)).close()
            accepted += 1
    result = float(total(c, torch.ones(1000), "a sum")[-1])
    kept = process.num_fds() - before
    c.close()
    return accepted, kept, result


def test_gloo_listens_no_longer_once_the_ranks_are_connected() -> None:
    assert spawn(3, connect_to_own_ports) == [(0, 0, 3.0)] * 3


@pytest.mark.parametrize("watched", [True, False])
def test_only_a_port_of_gloos_event_loop_is_closed(watched: bool) -> None:
    """Another thread may open a port and an event loop while Gloo opens its own."""
    with socket.create_server(("127.0.0.1", 0)) as port, select.epoll() as loop:
        if watched:
            loop.register(port.fileno(), select.EPOLLIN)
        address = port.getsockname()
        opened = {n: os.readlink(f"/proc/self/fd/{n}") for n in (port.fileno(), loop.fileno())}
        stop_listening(opened, "127.0.0.1")
        refused = pytest.raises(ConnectionRefusedError) if watched else nullcontext()
        with refused:
            socket.create_connection(address, LIMIT).close()


def test_an_event_loop_that_names_a_file_by_a_number_of_another_is_left_alone() -> None:
    """A loop still has a file whose descriptor was closed and whose number is the port's now."""
    with select.epoll() as other, select.epoll() as loop:
        first, held = os.pipe()
        other.register(first, select.EPOLLIN)
        copy = os.dup(first)  # so that the loop doesn't forget the file
        with socket.create_server(("127.0.0.1", 0)) as port:
            os.dup2(port.fileno(), first)
            loop.register(first, select.EPOLLIN)
            numbers = (first, other.fileno(), loop.fileno())
            opened = {n: os.readlink(f"/proc/self/fd/{n}") for n in numbers}
            assert stop_listening(opened, "127.0.0.1") == [loop.fileno()]
        for number in (first, held, copy):
            os.close(number)


def close_beside_a_stopped_peer(c: Communicator) -> str:
    """Return the error of a wait for a stopped peer, which `close` ends; rank 1 is that peer."""
    pids = gather_counts(c, os.getpid(), "the process ids")
    if c.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    peer, errors = psutil.Process(pids[1]), list[CommError]()
    try:
        while peer.status() != psutil.STATUS_STOPPED:
            threading.Event().wait(0.01)
        ticket = c.all_reduce(torch.ones(1000))

        def wait() -> None:
            try:
                ticket.wait("a sum")
            except CommError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        c.abort()
        waiting.join(LIMIT / 4)  # half of the collective's own limit
        assert not waiting.is_alive()
        c.close()
    finally:
        peer.resume()
    return type(errors[0]).__name__


def test_a_communicator_beside_a_stopped_peer_closes_at_once() -> None:
    assert spawn(2, close_beside_a_stopped_peer) == ["PeerLost", ""]


def fork_and_look(c: Communicator) -> tuple[int, int, float]:
    """Count this process's connections with its peers, and a forked child's; return a sum, too."""

    def peers() -> int:
        found = psutil.Process().net_connections("tcp")
        return sum(one.status == psutil.CONN_ESTABLISHED for one in found) - 1  # the store's

    ours, (answer, sender) = peers(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(sender, bytes([peers()]))
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(answer, 1)[0]
    for number in (answer, sender):
        os.close(number)
    result = float(total(c, torch.ones(1000), "a sum")[-1])
    c.close()
    return ours, theirs, result


def test_a_forked_child_has_none_of_the_connections() -> None:
    assert spawn(3, fork_and_look) == [(2, 0, 3.0)] * 3


def lose_a_peer(c: Communicator) -> str:
    if c.rank == 1:
        c.close()
        return ""
    try:
        total(c, torch.ones(3), "world.total()")
    except PeerLost as error:
        return str(error)
    raise AssertionError


def test_a_lost_peer_is_reported_without_gloos_own_text() -> None:
    sentence, _ = spawn(2, lose_a_peer)
    assert sentence == (
        "rank 0 lost a peer in world.total(): the process at 127.0.0.1 ended, or closed the "
        "connection."
    )


def test_a_rank_that_ends_leaves_the_others_at_work() -> None:
    def end_first(c: Communicator) -> float:
        ticket = c.all_reduce(tensor := torch.ones(1))
        if c.rank == 0:
            ticket.wait("a sum")
            c.close()
        else:
            ticket.wait("a sum")
        return float(tensor)

    assert run_ranks(2, end_first) == [2, 2]


def test_a_rank_alone_has_its_own_sums() -> None:
    c = SingleRankCommunicator()
    tensor = torch.arange(3.0)
    assert total(c, tensor, "a sum").tolist() == [0, 1, 2]
    broadcast_all(c, [tensor], "a broadcast")
    c.end_startup()
    c.close()
    c.abort()
    assert tensor.tolist() == [0, 1, 2]


class Unwoken:
    """A collective that Gloo doesn't end, though its peer is gone."""

    def is_completed(self) -> bool:
        return False

    def wait(self, limit: timedelta) -> None:
        threading.Event().wait(limit.total_seconds())
        raise RuntimeError("Operation timed out!")


def wait_unwoken(c: Communicator) -> tuple[str, float]:
    """Wait for a peer that has closed its connections; return the error, and the seconds."""
    assert isinstance(c, ProcessGroupCommunicator)
    total(c, torch.ones(1), "a sum")
    if c.rank == 1:
        c.abort()
        return "", 0.0
    ticket = c.all_reduce(torch.ones(1))
    ticket._work = Unwoken()  # type: ignore[attr-defined]
    began = time.monotonic()
    try:
        ticket.wait("a sum")
    except PeerLost as error:
        return str(error), time.monotonic() - began
    raise AssertionError


def test_a_wait_that_gloo_does_not_end_ends_soon_after_the_peer_has_closed() -> None:
    (sentence, seconds), _ = spawn(2, wait_unwoken)
    assert sentence == "rank 0 lost a peer in a sum: a peer closed the connection."
    assert seconds < LIMIT / 2


def wait_until_interrupted(c: Communicator) -> str:
    """Wait for a sum that rank 1 never starts, until another thread interrupts."""
    error = ""
    if c.rank == 0:
        interrupting = threading.Timer(0.05, c.interrupt)
        interrupting.start()
        try:
            total(c, torch.ones(1000), "a sum")
        except CommError as lost:
            error = type(lost).__name__
        interrupting.join()
        c.abort()
        c.interrupt()
    return error


def test_another_thread_interrupts_a_collective() -> None:
    start = time.monotonic()
    assert spawn(2, wait_until_interrupted) == ["PeerLost", ""]
    assert time.monotonic() - start < LIMIT


def test_no_rank_is_connected_before_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that closed at once would fail the others, which still connect."""
    store = HashStore()
    connect = process_group._gloo
    arrived, may_go = Event(), Event()

    def connect_late(store: Any, rank: int, *rest: Any) -> Any:
        group = connect(store, rank, *rest)
        if rank == 1:
            arrived.set()
            assert may_go.wait(30)
        return group

    def communicator(rank: int) -> ProcessGroupCommunicator:
        return ProcessGroupCommunicator(
            store,
            rank=rank,
            world_size=2,
            device=torch.device("cpu"),
            address="127.0.0.1",
            first_timeout=30,
            timeout=30,
        )

    monkeypatch.setattr(process_group, "_gloo", connect_late)
    monkeypatch.setattr(process_group, "_LOOK_S", 0.05)  # rank 0 looks at connections meanwhile
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(communicator, rank) for rank in range(2)]
        assert arrived.wait(30)
        assert not wait(ranks, timeout=0.5).done
        may_go.set()
        for rank in ranks:
            rank.result(30).close()
