"""The greeting of every connection between processes: what was recorded opens nothing."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import pytest
import torch
from torch.distributed import HashStore

from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.rendezvous.reachability import ProbeListener, probe_peers
from paceline.cluster.rendezvous.registration import Registration
from paceline.cluster.rendezvous.server_registration import (
    AVERAGING,
    Invitation,
    InvitedBucket,
    RegisteredServer,
    give_addresses,
)
from paceline.cluster.stores.folder_store import FolderStore
from paceline.comm.connection_window import ConnectionWindow, connect_window
from paceline.comm.handshake import (
    MAX_UNAUTHENTICATED,
    DialerGreeting,
    GreetingError,
    Handshakes,
    Identity,
    authenticate,
    secret_of,
)
from paceline.comm.peer_activities import Timeout
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.errors import PeerLost
from paceline.reduce.put_engine.layout import BucketSpec, Topology, lay_out
from paceline.reduce.put_engine.put_exchange import PutExchange
from paceline.server.serve import serve
from paceline.version import VERSION
from tests.harness.network.control_lines import Recorder, line_of
from tests.harness.network.recording_proxy import RecordingProxy
from tests.harness.network.window_kinds import LIMIT, bootstraps, shm_window, tcp_window
from tests.harness.twins.stored_addresses import StoredAddresses

HERE = "127.0.0.1"
TOKEN = "the same in all worlds"
NUMEL = 1000
WELCOME = b"\x01"
CHALLENGE = 64  # bytes that a listener answers before it knows the dialer
A = Identity(name="a", secret=secret_of(TOKEN, "a test"))
B = Identity(name="b", secret=A.secret)


class World(Protocol):
    """A listener of one kind, which waits for its dialer.

    Attributes:
        port: on which it listens.
    """

    port: int

    def dial(self, port: int) -> None:
        """Dial the listener at a port, and use the connection in both directions."""


class DataWorld:
    """Rank 0's window, to which rank 1 connects."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._store = HashStore()
        self._window = stack.enter_context(ThreadPoolExecutor()).submit(self._open, 0, self._store)
        self.port = int(self._store.get("window/0").decode().split()[1])

    def dial(self, port: int) -> None:
        store = HashStore()
        store.set("window/0", f"{HERE} {port}")
        dialed = self._open(1, store)
        window = self._window.result(LIMIT)
        for one, other in ((dialed, window), (window, dialed)):
            one.put(other.rank, 0, torch.full((8,), 7, dtype=torch.uint8), 0, 1)
            other.wait(one.rank, 0, 1, limit=LIMIT, operation="a put")
            assert other.memory.tolist() == [7] * 8

    def _open(self, rank: int, store: HashStore) -> ConnectionWindow:
        bootstrap = Bootstrap(
            addresses=StoredAddresses(store),
            rank=rank,
            world_size=2,
            token=TOKEN,
            purpose="window",
            limit=LIMIT,
        )
        window = tcp_window(bootstrap, HERE, 8, 1)
        self._stack.callback(window.close)
        return window


class OnlyWorker:
    """Addresses of one worker, which has nothing to find.

    Attributes:
        port: at which it listens, once that is published.
    """

    def __init__(self) -> None:
        self.port: Future[int] = Future()

    def publish(self, purpose: str, rank: int, where: str) -> None:
        if " " in where:  # otherwise of a local socket
            self.port.set_result(int(where.split()[1]))

    def find(self, purpose: str, rank: int) -> str:
        raise AssertionError(f"rank {rank} is looked for")

    def check(self) -> None:
        pass


class ServerWorld:
    """A worker's window, to which an averaging server connects."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        spec = BucketSpec(lengths=(NUMEL,), dtype=torch.float64)
        self._layout = layout = lay_out([spec], Topology.of([1]).served_by("the server"))
        self._store = FolderStore(str(folder), "start", timedelta(seconds=LIMIT), make=True)
        process = ProcessIdentity.of_this_process()
        self._registration = Registration(process=process, addresses=(HERE,), port=0)
        self._registered = RegisteredServer(self._store, self._registration)
        stack.callback(self._registered.close)
        self._pool = stack.enter_context(ThreadPoolExecutor())
        listening = OnlyWorker()
        bootstrap = Bootstrap(
            addresses=listening, rank=0, world_size=2, token=TOKEN, purpose="served", limit=LIMIT
        )
        where = (HERE, layout.size, layout.notifications)
        self._window = self._pool.submit(connect_window, bootstrap, (0,), *where)
        self.port = listening.port.result(LIMIT)

    def dial(self, port: int) -> None:
        bucket = InvitedBucket(
            lengths=(NUMEL,),
            dtype="float64",
            encoded=False,
            suppresses_zeros=False,
            returns_parameters=False,
            slots=1,
        )
        invitation = Invitation(
            role=AVERAGING,
            number=0,
            servers=("the server",),
            optimizer="",
            version=VERSION,
            token=TOKEN,
            purpose="served",
            workers_per_machine=(1,),
            names=("the worker",),
            buckets=(bucket,),
            wire="fp32",
            connections=1,
            model="01234567",
            size=self._layout.server_size,
            timeout=LIMIT,
        )
        for number, where in enumerate(("", f"{HERE} {port}")):  # of local sockets, and of TCP
            give_addresses(self._store, self._registration, "served", number, [where])
        served = self._pool.submit(
            serve, self._registered, invitation, limit=LIMIT, report=lambda line: None
        )
        values = torch.arange(float(NUMEL), dtype=torch.float64)
        window = self._window.result(LIMIT)
        timeout = Timeout(LIMIT, LIMIT)
        with closing(PutExchange(window, self._layout, [[values]], [["v"]], timeout)) as exchange:
            (sums,) = exchange.wait(0, exchange.send(0, [values], 2.0, "a merge"))
            assert sums is not None
            assert torch.equal(sums, 2 * values)
            exchange.drain()
        served.result(LIMIT)


class ControlWorld:
    """The control line of member b, which member a dials."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._recorder = Recorder()
        self._line = line_of("b", self._recorder)
        stack.callback(self._line.close)
        self.port = self._line.port

    def dial(self, port: int) -> None:
        dialing = line_of("a")
        self._stack.callback(dialing.close)
        dialing.expect("b", HERE, port)
        assert not dialing.wait_connected(["b"], LIMIT)
        assert dialing.send("b", "vote", {})
        self._recorder.wait(lambda recorder: len(recorder.frames) == 1)
        assert self._recorder.events == [("opened", "a")]


def answer_to(port: int, said: bytes) -> bytes:
    """Send bytes to a port; return what the listener answers before it closes the connection."""
    answer = b""
    with (
        suppress(ConnectionError),  # it may close before it has read everything
        socket.create_connection((HERE, port), LIMIT) as stream,
    ):
        stream.sendall(said)
        while data := stream.recv(4096):
            answer += data
    return answer


@pytest.mark.parametrize("world", [DataWorld, ServerWorld, ControlWorld])
def test_a_connection_that_was_recorded_opens_nothing_in_a_world_of_the_same_token(
    world: Callable[[ExitStack, Path], World], tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack:
        recorded = world(stack, folders[0])
        proxy = RecordingProxy(recorded.port)
        recorded.dial(proxy.port)
    proxy.close()
    assert all(len(said) >= 40 for said in (*proxy.dialed, *proxy.answered))
    with ExitStack() as stack:
        other = world(stack, folders[1])
        for said, answered in zip(proxy.dialed, proxy.answered, strict=True):
            answer = answer_to(other.port, said)
            assert answer != answered[: len(answer)]  # its nonce is another
            assert len(answer) <= CHALLENGE  # no welcome follows it
        other.dial(other.port)


def test_a_listener_that_was_recorded_is_not_taken_for_the_rank(tmp_path: Path) -> None:
    with ExitStack() as stack:
        recorded = DataWorld(stack, tmp_path)
        proxy = RecordingProxy(recorded.port)
        recorded.dial(proxy.port)
    proxy.close()

    def answer() -> None:
        stream, _ = server.accept()
        with stream, suppress(ConnectionError):
            stream.sendall(proxy.answered[0])
            while stream.recv(4096):
                pass

    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server((HERE, 0)))
        thread = threading.Thread(target=answer)
        thread.start()
        stack.callback(thread.join)
        other = DataWorld(stack, tmp_path)
        with pytest.raises(PeerLost, match=r"is not rank 0 of this job \(authentication failed\)"):
            other.dial(server.getsockname()[1])
        other.dial(other.port)


def test_a_greeting_of_another_purpose_token_or_world_size_proves_nothing() -> None:
    (ours, _) = bootstraps(2)
    for change in ({"purpose": "window/2"}, {"token": "another"}, {"world_size": 3}):
        theirs = replace(ours, **change)
        assert theirs.identity.secret != ours.identity.secret
    assert bootstraps(2)[1].identity.secret == ours.identity.secret
    assert ours.identity.secret.hex() not in repr(ours.identity)


@pytest.mark.parametrize("window", [tcp_window, shm_window])
def test_silent_dialers_delay_no_rank(
    window: Callable[..., ConnectionWindow],
) -> None:
    at = bootstraps(2)
    address = (HERE,) if window is tcp_window else ()
    with ExitStack() as stack:
        first = stack.enter_context(ThreadPoolExecutor()).submit(window, at[0], *address, 64, 1)
        where = at[1].addresses.find("window/1" if address else "window/1/machine", 0)
        for number in range(20):
            family = socket.AF_INET if address else socket.AF_UNIX
            silent = stack.enter_context(socket.socket(family))
            host, _, port = where.partition(" ")
            silent.connect((host, int(port)) if port else f"\0{where}")
            silent.sendall(DialerGreeting(A, "0").hello[: 30 * (number % 2)])
        for opened in (window(at[1], *address, 64, 1), first.result(LIMIT)):
            stack.callback(opened.close)


def test_silent_dialers_delay_no_probe() -> None:
    with closing(ProbeListener()) as listener, ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection((HERE, listener.port), LIMIT))
        listener.answer(TOKEN, 1)
        peers = {1: ([HERE], listener.port)}
        assert probe_peers(TOKEN, 0, peers, threading.Event().is_set) == {1: [HERE]}


def received_by(handshakes: Handshakes, dial: Callable[[int], None], port: int) -> str:
    """Dial in another thread; return the name of the dialer whose handshake ends first."""
    with ThreadPoolExecutor() as pool:
        dialed = pool.submit(dial, port)
        name, stream = handshakes.next(time.monotonic() + LIMIT)
        stream.close()
        dialed.result(LIMIT)
        return name


def dial_b(port: int) -> None:
    with socket.create_connection((HERE, port), LIMIT) as stream:
        authenticate(stream, A, "b", time.monotonic() + LIMIT)


def test_a_flood_of_dialers_takes_few_descriptors() -> None:
    with socket.create_server((HERE, 0)) as server, ExitStack() as stack:
        port = server.getsockname()[1]
        handshakes = stack.enter_context(closing(Handshakes(server, B, None, 1)))
        before = len(os.listdir("/proc/self/fd"))
        own = 0

        def flood() -> None:
            nonlocal own
            for number in range(500):
                stream = socket.create_connection((HERE, port), LIMIT)
                stream.sendall(DialerGreeting(A, "b").hello[: number % 400])
                if number < 300:
                    own += 1
                    stack.enter_context(stream)
                else:
                    stream.close()
            dial_b(port)

        assert received_by(handshakes, lambda _: flood(), port) == "a"
        assert len(os.listdir("/proc/self/fd")) - own - before <= 1 + MAX_UNAUTHENTICATED


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 100_000,
        DialerGreeting(A, "b").hello + b"x" * 100_000,
        DialerGreeting(A, "b", kind=b"?").hello,
        DialerGreeting(A, "c").hello,
        DialerGreeting(Identity(name="a", secret=b"another"), "b").hello + bytes(32),
    ],
    ids=["of HTTP", "long", "with a long end", "of no kind", "to another", "of another token"],
)
def test_nonsense_ends_its_connection_alone(said: bytes) -> None:
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
        answers: list[bytes] = []

        def dial(port: int) -> None:
            answers.append(answer_to(port, said))
            dial_b(port)

        with closing(Handshakes(server, B, None, 1)) as handshakes:
            assert received_by(handshakes, dial, port) == "a"
        assert len(answers[0]) in (0, 64)  # a challenge at most


def test_a_dialer_that_is_not_expected_is_shown_out() -> None:
    def dial(port: int) -> None:
        with pytest.raises((GreetingError, ConnectionError)):
            dial_b(port)
        with socket.create_connection((HERE, port), LIMIT) as stream:
            other = Identity(name="the expected one", secret=A.secret)
            authenticate(stream, other, "b", time.monotonic() + LIMIT)

    with (
        socket.create_server((HERE, 0)) as server,
        closing(Handshakes(server, B, {"the expected one"}, 1)) as handshakes,
    ):
        assert received_by(handshakes, dial, server.getsockname()[1]) == "the expected one"


def test_more_ranks_may_dial_at_once_than_strangers() -> None:
    expected = MAX_UNAUTHENTICATED + 40
    with socket.create_server((HERE, 0), backlog=expected) as server, ExitStack() as stack:
        handshakes = stack.enter_context(closing(Handshakes(server, B, None, expected)))
        pool = stack.enter_context(ThreadPoolExecutor())
        deadline = time.monotonic() + LIMIT
        received = pool.submit(lambda: [handshakes.next(deadline) for _ in range(expected)])
        dialed: list[tuple[socket.socket, DialerGreeting]] = []
        for _ in range(expected):
            stream = stack.enter_context(socket.create_connection(server.getsockname(), LIMIT))
            dialed.append((stream, DialerGreeting(A, "b")))
            stream.sendall(dialed[-1][1].hello)
        proofs = [one.feed(stream.recv(64, socket.MSG_WAITALL)) for stream, one in dialed]
        for (stream, _), proof in zip(dialed, proofs, strict=True):
            stream.sendall(proof)
            assert stream.recv(1) == WELCOME
        for name, stream in received.result(LIMIT):
            assert name == "a"
            stream.close()
