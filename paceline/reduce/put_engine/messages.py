"""Messages between workers and parameter servers, over the exchange's window.

    sender     length, first part ─▶ buffer          next part ─▶ buffer
    receiver                        copied, acknowledged        copied, handled, acknowledged

A message is bytes of any length. The sender puts one part at a time, and the next one once that is
acknowledged, so that one receive buffer a peer is enough. The last part is acknowledged when the
message has been handled: `wait_handled` returns then.

Messages and acknowledgements overtake gradients and parameters that wait to be sent: servers return
nothing of a step before they have its record.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.comm.peer_activities import Timeout
from paceline.comm.window import Window
from paceline.errors import CommTimeout, PeerLost
from paceline.reduce.put_engine.layout import MESSAGE, Layout

_LENGTH = 8  # bytes, in front of each part: of what is left of the message, this part included
_PART = MESSAGE - _LENGTH
_WAIT_SLICE_S = 0.5
_URGENT = -(2**31)  # a put's priority; buckets have minus their index


class Messages:
    """Messages of one rank, to its peers and from them; one of its threads calls the methods.

    Args:
        window: the exchange's window.
        layout: layout of the window.
        timeout: timeout of each wait for a peer.

    Attributes:
        rank: this rank.
        layout: layout of the window.
    """

    def __init__(self, window: Window, layout: Layout, timeout: Timeout) -> None:
        self.rank = window.rank
        self.layout = layout
        self._window = window
        self._timeout = timeout
        self._sent = dict.fromkeys(range(window.world_size), 0)  # parts, by peer
        self._received = dict.fromkeys(range(window.world_size), 0)
        self._begun: dict[int, bytearray] = {}  # by peer, a message's parts so far

    def send(self, peer: int, message: bytes, operation: str) -> None:
        """Send a message, once the last one to that peer has been handled.

        Raises:
            PeerLost: a peer ended.
            CommTimeout: a wait timed out.
        """
        for start in range(0, max(1, len(message)), _PART):
            self.wait_handled(peer, operation)
            left = np.array([len(message) - start], np.int64).tobytes()
            data = bytearray(left + message[start : start + _PART])
            self._sent[peer] += 1
            self._window.put(
                peer,
                self._buffer(of=peer, sender=self.rank),
                torch.frombuffer(data, dtype=torch.uint8),
                self.layout.message,
                self._sent[peer],
                _URGENT,
            )

    def wait_handled(self, peer: int, operation: str) -> None:
        """Wait until a peer has handled all messages to it; raises as `send`."""
        self._wait(peer, self.layout.message + 1, self._sent[peer], operation)

    def receive(self, peer: int, operation: str) -> bytes:
        """Wait for a peer's next message, and acknowledge it; raises as `send`."""
        while True:
            self._wait(peer, self.layout.message, self._received[peer] + 1, operation)
            message = self.arrived(peer)
            if message is not None:
                self.acknowledge(peer)
                return message

    def arrived(self, peer: int) -> bytes | None:
        """Return a peer's next message, to be acknowledged; None: not all of it has arrived."""
        while self._window.values[peer, self.layout.message] > self._received[peer]:
            buffer = self._buffer(of=self.rank, sender=peer)
            memory = self._window.memory[buffer : buffer + MESSAGE].numpy()
            left = int(memory[:_LENGTH].view(np.int64)[0])
            parts = self._begun.setdefault(peer, bytearray())
            parts += memory[_LENGTH : _LENGTH + min(left, _PART)].tobytes()
            self._received[peer] += 1
            if left <= _PART:
                return bytes(self._begun.pop(peer))
            self.acknowledge(peer)
        return None

    def acknowledge(self, peer: int) -> None:
        """Acknowledge all parts that have been received of a peer; its messages are handled."""
        row = self.layout.message + 1
        self._window.put(peer, 0, None, row, self._received[peer], _URGENT)

    def _buffer(self, *, of: int, sender: int) -> int:
        """Return the offset of a rank's receive buffer for a sender's messages."""
        topology = self.layout.topology
        if of in topology.contributors:
            return self.layout.to_workers[topology.owners.index(sender)]
        return self.layout.to_servers[topology.contributors.index(sender)]

    def _wait(self, peer: int, notification: int, value: int, operation: str) -> None:
        with self._timeout.limit(operation) as limit:
            while self._window.values[peer, notification] < value:
                within = limit.slice(_WAIT_SLICE_S)
                try:
                    self._window.wait(peer, notification, value, limit=within, operation=operation)
                except CommTimeout:
                    if limit.look():
                        raise
                except PeerLost as error:  # that peer may have ended because it lost another one
                    raise self._named(self._window.lost_first(error)) from error

    def _named(self, error: PeerLost) -> PeerLost:
        """Name the server, if one is the peer that was lost."""
        topology = self.layout.topology
        names = dict(zip(topology.owners, topology.servers, strict=True))
        return error if error.peer not in names else error.named(names[error.peer])
