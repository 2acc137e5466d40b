"""Random puts between windows, and what the memory must hold after them.

Each rank puts to each other one in several lanes at once. A lane is a stretch of the peer's memory
in which one put is under way; the next one goes when the peer has answered. Which bytes the n-th
put of a lane carries, where they go and how urgent they are is a function of (seed, sender,
receiver, lane, n) that both ends know, so that the receiver's account needs nothing of what came:

    lane l of sender s    memory[at:at + length]        notification l        puts
                                                        notification L + l    answers, no bytes
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from paceline.comm.window import Window
from tests.harness.network.window_kinds import LIMIT

_POOL = torch.from_numpy(np.random.default_rng(5).integers(0, 256, 2**21, np.uint8))
_BYTES = _POOL.numpy()


class Put(NamedTuple):
    """What a put carries: `size` bytes of the pool, to `start` in its lane."""

    start: int
    size: int
    source: int
    priority: int


def put_of(seed: int, sender: int, receiver: int, lane: int, number: int, length: int) -> Put:
    """Return a lane's n-th put; half of all sizes are below the root of the lane's length."""
    drawn = hash((seed, sender, receiver, lane, number))
    size = int((length + 2) ** ((drawn & 0xFFFF) / 0xFFFF)) - 1
    size = min(size, length)
    start = (drawn >> 16 & 0xFFFFFF) % (length - size + 1)
    return Put(start, size, (drawn >> 24 & 0xFFFFFF) % (len(_BYTES) - length), drawn >> 48 & 3)


class Traffic:
    """One rank's part in the traffic.

    Args:
        window: this rank's.
        lanes: bytes of each lane; the same on all ranks.
        rounds: puts a lane.
        seed: the same on all ranks.

    Attributes:
        operations: puts and answers that came here, by the account.
    """

    def __init__(self, window: Window, lanes: Sequence[int], rounds: int, seed: int) -> None:
        self.window, self.lanes, self.rounds, self.seed = window, lanes, rounds, seed
        self.operations = 0
        self._others = [peer for peer in range(window.world_size) if peer != window.rank]
        self._random = random.Random(seed * 100 + window.rank)
        keys = [(peer, lane) for peer in self._others for lane in range(len(lanes))]
        self._sent = dict.fromkeys(keys, 0)
        self._came = dict.fromkeys(keys, 0)
        self._memory = window.memory.numpy()
        self._account = np.zeros_like(self._memory)
        self._at = np.concatenate([[0], np.cumsum(lanes)]).tolist()
        self._own = {peer: torch.empty(lanes[0], dtype=torch.uint8) for peer in self._others}
        self._events = self._nudges = 0

    def run(self) -> int:
        """Put and answer until all has come; return how many notifications came.

        Raises:
            AssertionError: something came before its data, not at all, twice, or elsewhere.
        """
        while self._sweep():
            if self._random.random() < 0.05:
                self.window.wake()
                self._nudges += 1
            self._wait()
        assert np.array_equal(self._memory, self._account), "something else was written"
        expected = self.operations + self._nudges
        while self._events < expected:
            self._wait()
        assert self._events == expected, "one came twice"
        return self.operations

    def check_after_a_cut(self) -> None:
        """Hold all that came to the account; of a lane's next put there may be a part."""
        for peer, lane in self._came:
            self._record(peer, lane)
            begin, length = self._begin(peer, lane), self.lanes[lane]
            put = put_of(self.seed, peer, self.window.rank, lane, self._came[peer, lane], length)
            before, after = (
                slice(begin, begin + put.start),
                slice(begin + put.start + put.size, begin + length),
            )
            for part in (before, after):
                assert np.array_equal(self._memory[part], self._account[part])

    def _take(self, peer: int, lane: int) -> None:
        """Answer a lane's next put if it has come."""
        if self._record(peer, lane):
            self.window.put(peer, 0, None, len(self.lanes) + lane, self._came[peer, lane])

    def _record(self, peer: int, lane: int) -> bool:
        """Hold a lane's next put to the account if it has come; return whether it has."""
        number, length = self._came[peer, lane], self.lanes[lane]
        value = int(self.window.values[peer, lane])
        if value == number:
            return False
        assert value == number + 1, "one was lost, or came twice"
        put = put_of(self.seed, peer, self.window.rank, lane, number, length)
        begin = self._begin(peer, lane)
        at = begin + put.start
        self._account[at : at + put.size] = _BYTES[put.source : put.source + put.size]
        lie = slice(begin, begin + length)
        right = np.array_equal(self._memory[lie], self._account[lie])
        assert right, "a notification came before its data, or they went elsewhere"
        self._came[peer, lane] += 1
        return True

    def _send(self, peer: int, lane: int) -> None:
        number, answers = self._sent[peer, lane], len(self.lanes) + lane
        if number == self.rounds or self.window.values[peer, answers] < number:
            return
        if number > 0:
            assert self.window.values[peer, answers] == number, "an answer came twice"
        put = put_of(self.seed, self.window.rank, peer, lane, number, self.lanes[lane])
        source = _POOL[put.source : put.source + put.size]
        if lane == 0:  # from memory that is written again and again
            self.window.flush(peer, limit=LIMIT, operation="a flush")
            source = self._own[peer][: put.size].copy_(source)
        at = self._at_in_peer(lane)
        cut = put.source % (put.size + 1)
        sources = [source[:cut], source[cut:]] if number % 2 else source
        self.window.put(peer, at + put.start, sources, lane, number + 1, put.priority)
        self._sent[peer, lane] += 1

    def _sweep(self) -> bool:
        """Look at all lanes once, in any order; tell whether something is still to come."""
        keys = list(self._sent)
        self._random.shuffle(keys)
        for peer, lane in keys:
            self._take(peer, lane)
            self._send(peer, lane)
        answered = self.window.values[:, len(self.lanes) :]
        came = sum(self._came.values())
        self.operations = came + int(answered.sum())
        return self.operations < 2 * self.rounds * len(self._sent)

    def _wait(self) -> None:
        events = self.window.wait_for_event(self._events, LIMIT)
        assert events > self._events, "one was lost"
        self._events = events

    def _begin(self, peer: int, lane: int) -> int:
        begin: int = peer * self._at[-1] + self._at[lane]
        return begin

    def _at_in_peer(self, lane: int) -> int:
        return self._begin(self.window.rank, lane)
