"""What a peer that isn't one says to a window by NIXL."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from paceline.comm.nixl.agent import NixlAgent
from paceline.comm.nixl.window import NixlWindow, nixl_window
from paceline.comm.transport.tcp import connect_by_tcp
from paceline.errors import ConfigError, PeerLost
from tests.harness.network.window_kinds import LIMIT, bootstraps

pytest.importorskip("nixl", reason="NIXL isn't installed: no windows by it", exc_type=ImportError)

Half = tuple["Future[NixlWindow]", socket.socket]


@pytest.fixture
def half() -> Iterator[Half]:
    """Yield rank 0's window, as it is made, and rank 1's end of the line."""
    at = bootstraps(2)
    with ThreadPoolExecutor() as pool:
        window = pool.submit(nixl_window, at[0], "127.0.0.1", 64, 1)
        line = connect_by_tcp(at[1], "127.0.0.1")[0][0]
        assert line is not None
        line.settimeout(LIMIT)
        yield window, line
        line.close()


@pytest.mark.parametrize(
    "card",
    [struct.pack("!QI", 0, 2**30), struct.pack("!QI", 0, 100) + b"\1" * 100, b"short"],
    ids=["too long", "nonsense", "cut off"],
)
def test_what_is_no_card_is_refused_by_its_senders_name(half: Half, card: bytes) -> None:
    window, line = half
    line.sendall(card)
    line.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerLost, match="rank 0 cannot connect to rank 1 with NIXL: "):
        window.result(LIMIT)


def test_nonsense_on_the_line_ends_it(half: Half) -> None:
    window, line = half
    agent = NixlAgent("rank 1")
    metadata = agent.metadata()
    line.sendall(struct.pack("!QI", 0, len(metadata)) + metadata + b"r")
    made = window.result(LIMIT)
    line.sendall(b"ppp and something else")
    with pytest.raises(PeerLost, match="rank 0 lost rank 1 in bucket 3: protocol error"):
        made.wait(1, 0, 1, limit=LIMIT, operation="bucket 3")
    made.close()
    agent.close()


def test_a_machine_without_nixl_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.comm.nixl.agent.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"run pip install 'paceline\[nixl\]'"):
        NixlAgent("alone")
