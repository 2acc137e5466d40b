"""Zero suppression: a put between machines carries only the nonzero 64-byte blocks of a bucket.

The gradient of an embedding is zero but for the rows that the batch used. A block is 64 bytes of
what a codec made of it, or of the values themselves. If at most 70% of the blocks have a bit other
than zero, these travel alone, and the receiver writes zeros around them:

    payload     [ -1    | all bytes                                             ]
                [ count | blocks | their indices, int32 | bytes behind the last ]

The receiver has the same bytes in both cases (-0.0 isn't zero), so all sums and residuals have the
same bits. Each rank decides for itself, in each step, for each receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.reduce.put_engine.layout import PREAMBLE

BLOCK_BYTES = 64
RETURNED = -1  # in place of a receiver's group: the sums, which all other groups receive
_DENSE = -1  # in place of a count: all bytes follow
_INDEX_BYTES = 4  # of a block's index
MAX_NONZERO_SHARE = 0.7  # of a payload's blocks; if more are nonzero, all bytes travel
_PROBES = 256  # blocks that are looked at first, evenly spaced
_CHUNK = 16_384  # blocks, 1 MB: the comparison's result stays in a cache
_INTEGERS = BLOCK_BYTES // 8  # int64, of a block
_Blocks = NDArray[np.int64]  # (blocks, 8)


class ZeroSuppression:
    """Zero suppression of one bucket on one rank: makes payloads, and restores what they stand for.

    Each receiver's payload has memory of its own, which is written again when the bucket's next
    version is: by then all receivers have the one before.

    Args:
        receivers: the number of other groups.
    """

    def __init__(self, receivers: int) -> None:
        self._receivers = receivers
        self._payloads: dict[int, NDArray[np.uint8]] = {}
        self._restored: dict[tuple[int, int], _Restored] = {}
        self._sent: dict[int, int] = {}  # bytes of the newest payloads
        self._received: dict[tuple[int, int], int] = {}

    def suppress(self, receiver: int, data: Sequence[Tensor]) -> list[Tensor]:
        """Return the payload of contiguous tensors, which follow each other.

        Args:
            receiver: a group that gets a contribution, or `RETURNED`.
            data: what the payload stands for.
        """
        source = _bytes(data)
        blocks = _blocks(source)  # (blocks, 8) int64
        indices = _nonzero(blocks)  # (nonzero blocks,) int64
        if indices is None:
            self._sent[receiver] = PREAMBLE + len(source)
            return [_preamble(_DENSE), *data]
        rest = source[blocks.nbytes :]
        size = PREAMBLE + len(indices) * (BLOCK_BYTES + _INDEX_BYTES) + len(rest)
        payload = self._memory(receiver, size)
        payload[:PREAMBLE] = _preamble(len(indices)).numpy()
        taken, indices_at, rest_at = _parts(payload, len(indices))
        np.take(blocks, indices, axis=0, out=taken, mode="clip")  # "raise" would copy `out`
        indices_at[:] = indices
        rest_at[:] = rest
        self._sent[receiver] = size
        return [torch.from_numpy(payload)]

    def restore(self, kind: int, group: int, payload: Tensor) -> Tensor:
        """Return the bytes that a payload stands for, (bytes,), until the sender's next one.

        Args:
            kind: of the notification that announced it, `CONTRIBUTION` or `SUM`.
            group: the sender's.
            payload: what the receive buffer holds, (PREAMBLE + bytes,).
        """
        key = (kind, group)
        received = payload.numpy()
        size = len(payload) - PREAMBLE
        count = int(received[:8].view(np.int64)[0])
        if count == _DENSE:
            self._received[key] = PREAMBLE + size
            return payload[PREAMBLE : PREAMBLE + size]
        length = PREAMBLE + count * (BLOCK_BYTES + _INDEX_BYTES) + size % BLOCK_BYTES
        self._received[key] = length
        if key not in self._restored:
            self._restored[key] = _Restored(size)
        return self._restored[key].write(*_parts(received[:length], count))

    def traffic(self) -> tuple[int, int]:
        """Return the bytes of the newest version's payloads that this rank sent, and received."""
        sent = sum(
            size * (self._receivers if r == RETURNED else 1) for r, size in self._sent.items()
        )
        return sent, sum(self._received.values())

    def _memory(self, receiver: int, size: int) -> NDArray[np.uint8]:
        """Return a receiver's memory, of so many bytes."""
        if receiver not in self._payloads or len(self._payloads[receiver]) < size:
            self._payloads[receiver] = np.empty(size + size // 8, np.uint8)
        return self._payloads[receiver][:size]


class _Restored:
    """Bytes of one sender: zeros, and the blocks that came last.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self._tensor = torch.zeros(size, dtype=torch.uint8)
        self._bytes = self._tensor.numpy()
        self._written: NDArray[np.int32] = np.zeros(0, np.int32)  # indices of nonzero blocks

    def write(self, blocks: _Blocks, indices: NDArray[np.int32], rest: NDArray[np.uint8]) -> Tensor:
        """Write these blocks, zeros in place of those before, and the bytes behind the last one."""
        own = _blocks(self._bytes)  # (all blocks, 8) int64
        own[self._written] = 0
        own[indices] = blocks
        self._bytes[own.nbytes :] = rest
        self._written = indices.copy()
        return self._tensor


def _nonzero(blocks: _Blocks) -> NDArray[np.intp] | None:
    """Return the indices of the blocks with a bit other than zero; None if they are too many."""
    most = int(len(blocks) * MAX_NONZERO_SHARE)
    probes = blocks[:: max(1, len(blocks) // _PROBES)]
    if np.count_nonzero(probes.any(1)) > MAX_NONZERO_SHARE * len(probes):
        return None
    found = []
    count = 0
    nonzero = np.empty((min(_CHUNK, len(blocks)), _INTEGERS), bool)
    for begin in range(0, len(blocks), _CHUNK):
        chunk = blocks[begin : begin + _CHUNK]
        flags = nonzero[: len(chunk)]
        np.not_equal(chunk, 0, out=flags)
        indices = np.flatnonzero(flags.view(np.int64))  # a block's eight flags as one integer
        count += len(indices)
        if count > most:
            return None
        found.append(indices + begin)
    return np.concatenate(found) if found else np.zeros(0, np.intp)


def _parts(payload: NDArray[np.uint8], count: int) -> tuple[_Blocks, Any, NDArray[np.uint8]]:
    """View a payload's blocks, their indices, (count,) int32, and the bytes behind the last one."""
    indices = PREAMBLE + count * BLOCK_BYTES
    rest = indices + count * _INDEX_BYTES
    blocks = _blocks(payload[PREAMBLE:indices])
    return blocks, payload[indices:rest].view(np.int32), payload[rest:]


def _blocks(data: NDArray[np.uint8]) -> _Blocks:
    """View the whole blocks of some bytes, (blocks, 8) int64."""
    return data[: len(data) // BLOCK_BYTES * BLOCK_BYTES].view(np.int64).reshape(-1, _INTEGERS)


def _bytes(data: Sequence[Tensor]) -> NDArray[np.uint8]:
    """View one tensor's bytes, or copy those of several."""
    parts = [tensor.view(torch.uint8) for tensor in data]
    if len(parts) == 1:
        return parts[0].numpy()
    return np.concatenate([np.zeros(0, np.uint8), *(part.numpy() for part in parts)])


def _preamble(count: int) -> Tensor:
    """Make a payload's first bytes, (PREAMBLE,)."""
    preamble = torch.zeros(PREAMBLE, dtype=torch.uint8)
    preamble[:8].view(torch.int64)[0] = count
    return preamble
