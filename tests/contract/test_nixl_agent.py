"""NIXL by itself: memory that was taken back stays as it is."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from paceline.comm.nixl.agent import NixlAgent
from tests.harness.network.window_kinds import LIMIT

pytest.importorskip("nixl", reason="NIXL isn't installed: no windows by it", exc_type=ImportError)
SIZE = 4_000_000


def write(agent: NixlAgent, name: str, source: Tensor, target: int, peer: NixlAgent | None) -> None:
    """Write all of a source, while the peer looks into NIXL, too."""
    transfer = agent.write(name, [(source.data_ptr(), SIZE)], target, b"written")
    deadline = time.monotonic() + LIMIT
    while not agent.done(transfer) and time.monotonic() < deadline:
        if peer is not None:
            peer.arrived()


def test_a_write_to_a_peer_that_is_closed_changes_nothing() -> None:
    ours, theirs = NixlAgent("ours"), NixlAgent("theirs")
    source, memory = (torch.full((SIZE,), value, dtype=torch.uint8) for value in (1, 0))
    ours.memory.take(source)
    theirs.memory.take(memory)
    name = ours.connect(theirs.metadata())
    write(ours, name, source, memory.data_ptr(), theirs)
    assert torch.equal(memory, source)
    theirs.close()
    memory.zero_()  # of the next generation, at the same address
    with suppress(Exception):  # NIXL notices, but when?
        write(ours, name, source, memory.data_ptr(), None)
    assert not memory.any()
    ours.close()
