"""Format of the control line's frames: a fixed header, a kind, a JSON object, and bulk bytes.

    frame   | magic | 0 | kind length | body length | bulk length | kind | JSON body |
    chunk   | magic | 1 | 0           | size        | 0           | bytes

The bulk bytes of a frame follow it in chunks, and other frames pass between two chunks. A
connection carries one frame with bulk bytes at a time in each direction.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

JSON: TypeAlias = Union[bool, int, float, str, "Sequence[JSON]", "Mapping[str, JSON]", None]

# A length is checked against these limits before memory is allocated for what it announces.
MAX_BODY = 2**24  # bytes of a frame's JSON
CHUNK = 2**18  # bytes of a chunk at most
_MAGIC = b"PcL1"
_HEAD = struct.Struct("!4sBBxxIQ")
_FRAME, _CHUNK = range(2)


class InvalidFrame(Exception):
    """Error: the bytes from a peer are no frames."""


@dataclass(frozen=True)
class Frame:
    """Frame: one message of the control line.

    Attributes:
        kind: what the message is about.
        body: its JSON object.
        bulk: its bulk bytes; empty for none.
    """

    kind: str
    body: dict[str, Any]
    bulk: bytes | bytearray


def encode(kind: str, body: Mapping[str, JSON], bulk_size: int = 0) -> bytes:
    """Return the bytes of a frame, up to its first chunk."""
    name = kind.encode()
    text = json.dumps(body, separators=(",", ":")).encode()
    assert 0 < len(name) < 256
    assert len(text) <= MAX_BODY
    return _HEAD.pack(_MAGIC, _FRAME, len(name), len(text), bulk_size) + name + text


def chunk_header(size: int) -> bytes:
    """Return the bytes that precede a chunk of bulk bytes."""
    return _HEAD.pack(_MAGIC, _CHUNK, 0, size, 0)


class FrameReader:
    """Incremental decoder of one connection's frames.

    Args:
        max_bulk: the bulk bytes of a frame at most.
    """

    def __init__(self, max_bulk: int) -> None:
        self._max_bulk = max_bulk
        self._head = bytearray()  # a header, or a frame without its bulk bytes
        self._need = _HEAD.size  # the length at which `_head` is complete
        self._chunk_left = 0
        self._bulk_left = 0  # bytes that belong to `_bulk_frame` and have not arrived
        self._bulk_size = 0
        self._bulk_frame: Frame | None = None

    def feed(self, data: memoryview) -> list[Frame]:
        """Decode the next bytes; return the frames that they complete.

        Raises:
            InvalidFrame: the bytes are no frames, or a frame is too large.
        """
        frames: list[Frame] = []
        while data:
            if self._chunk_left:
                part = data[: self._chunk_left]
                data = data[self._chunk_left :]
                frames += self._extend_bulk(part)
                continue
            missing = self._need - len(self._head)
            self._head += data[:missing]
            data = data[missing:]
            if len(self._head) == self._need:
                frames += self._read_header() if self._need == _HEAD.size else self._read_frame()
        return frames

    def _read_header(self) -> list[Frame]:
        magic, what, kind_size, size, bulk_size = _HEAD.unpack(self._head)
        if magic != _MAGIC:
            raise InvalidFrame("a frame does not begin with the magic bytes")
        if what == _FRAME and kind_size and 2 <= size <= MAX_BODY and bulk_size <= self._max_bulk:
            self._bulk_size = bulk_size
            self._need += kind_size + size
        elif what == _CHUNK and 0 < size <= min(CHUNK, self._bulk_left):
            self._chunk_left = size
            self._head.clear()
        else:
            raise InvalidFrame(f"a header has type {what}, size {size:,}, bulk {bulk_size:,}")
        return []

    def _read_frame(self) -> list[Frame]:
        kind_size = self._head[5]
        start = _HEAD.size + kind_size
        try:
            kind = self._head[_HEAD.size : start].decode()
            body = json.loads(self._head[start:])
        except (ValueError, RecursionError) as error:
            raise InvalidFrame(f"a frame's body is no JSON ({error})") from error
        if not isinstance(body, dict):
            raise InvalidFrame("a frame's body is no JSON object")
        self._head.clear()
        self._need = _HEAD.size
        if not self._bulk_size:
            return [Frame(kind, body, b"")]
        if self._bulk_frame is not None:
            raise InvalidFrame("a frame with bulk bytes begins inside another")
        # At once: to grow it takes twice the memory, and leaves holes in the allocator's.
        self._bulk_frame = Frame(kind, body, bytearray(self._bulk_size))
        self._bulk_left = self._bulk_size
        return []

    def _extend_bulk(self, part: memoryview) -> list[Frame]:
        frame = self._bulk_frame
        assert frame is not None
        assert isinstance(frame.bulk, bytearray)
        start = len(frame.bulk) - self._bulk_left
        with memoryview(frame.bulk) as bulk:
            bulk[start : start + len(part)] = part
        self._chunk_left -= len(part)
        self._bulk_left -= len(part)
        if self._bulk_left:
            return []
        self._bulk_frame = None
        return [frame]
