"""Frames and greetings of the control line, without connections."""

from __future__ import annotations

import random

import pytest

from paceline.cluster.membership.control_line.frames import (
    CHUNK,
    Frame,
    FrameReader,
    InvalidFrame,
    chunk_header,
    encode,
)
from paceline.cluster.membership.control_line.outbox import Outbox
from paceline.comm.handshake import (
    BEATS,
    FRAMES,
    DialerGreeting,
    Greeting,
    GreetingError,
    Identity,
    ListenerGreeting,
)

BULK = bytes(range(256)) * 2500  # two chunks and a half
VOTE = encode("vote", {"ballot": [1, "a"], "of": None})
SECRET = b"s" * 32
A = Identity(name="a", secret=SECRET)


def written(outbox: Outbox) -> list[bytes]:
    units = []
    while parts := outbox.take():
        units.append(b"".join(parts))
    return units


def with_bulk(kind: str, body: dict[str, int], bulk: bytes) -> bytes:
    outbox = Outbox(2**20)
    views = memoryview(bulk)[:1000], memoryview(bulk)[1000:]
    assert outbox.add(encode(kind, body, len(bulk)), *views) == (True, True)
    return b"".join(written(outbox))


@pytest.mark.parametrize("seed", range(5))
def test_frames_arrive_as_they_were_written_however_the_stream_is_cut(seed: int) -> None:
    data = VOTE + with_bulk("part", {"rank": 1}, BULK) + VOTE
    reader, frames, cuts = FrameReader(2**20), [], random.Random(seed)
    while data:
        size = cuts.choice([1, 7, 4096, 300_000])
        frames += reader.feed(memoryview(data[:size]))
        data = data[size:]
    vote = Frame("vote", {"ballot": [1, "a"], "of": None}, b"")
    assert frames == [vote, Frame("part", {"rank": 1}, BULK), vote]


def test_small_frames_pass_the_chunks_of_a_large_one() -> None:
    outbox = Outbox(2**20)
    outbox.add(encode("part", {}, len(BULK)), memoryview(BULK))
    first = b"".join(outbox.take())
    outbox.add(VOTE)
    outbox.add(VOTE)
    rest = written(outbox)
    assert rest[0] == VOTE * 2
    assert len(rest) == 3
    reader = FrameReader(2**20)
    frames = reader.feed(memoryview(first + b"".join(rest)))
    assert [frame.kind for frame in frames] == ["vote", "vote", "part"]
    assert frames[-1].bulk == BULK


def test_an_outbox_refuses_what_exceeds_its_room_and_wakes_its_thread_once() -> None:
    outbox = Outbox(len(BULK))
    head = encode("part", {}, len(BULK))
    assert outbox.add(head, memoryview(BULK)) == (True, True)
    assert outbox.add(head, memoryview(b"x")) == (False, False)
    assert outbox.add(VOTE) == (True, False)
    written(outbox)
    assert outbox.is_idle()
    assert outbox.add(head, memoryview(BULK)) == (True, True)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n    ",
        chunk_header(5) + b"12345",  # of no frame
        encode("part", {}, 2**20 + 1),
        encode("part", {}, 5) + chunk_header(6),
        encode("part", {}, 5) + encode("part", {}, 5),
        encode("part", {}, CHUNK + 1) + chunk_header(CHUNK + 1),
        VOTE[:-1] + b"x",
        VOTE[:20] + b"vote" + b"[" * (len(VOTE) - 24),
        encode("part", {}, 0).replace(b"{}", b"[]"),
        b"PcL1\x00\x01\0\0" + (2**24 + 1).to_bytes(4, "big") + bytes(8),
    ],
)
def test_bytes_that_are_no_frames_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidFrame):
        FrameReader(2**20).feed(memoryview(data))


def test_deeply_nested_json_is_refused() -> None:
    text = b"[" * 200_000
    head = b"PcL1\x00\x01\0\0" + len(text).to_bytes(4, "big") + bytes(8)
    with pytest.raises(InvalidFrame):
        FrameReader(2**20).feed(memoryview(head + b"k" + text))


def greet(dialer: DialerGreeting, listener: Greeting) -> None:
    """Pass the messages between two sides until both have ended."""
    message = listener.feed(dialer.hello)
    while message:
        message = dialer.feed(message)
        message = listener.feed(message) if message else b""


class Decided:
    """Listener that wants all connections, or none."""

    def __init__(self, accepts: bool) -> None:
        self._accepts = accepts

    def accepts(self, greeting: Greeting) -> bool:
        return self._accepts


def listener(secret: bytes = SECRET, name: str = "b", accepts: bool = True) -> ListenerGreeting:
    return ListenerGreeting(Identity(name=name, secret=secret), Decided(accepts))


def test_both_sides_of_a_greeting_agree_on_kind_names_and_session() -> None:
    a, b = DialerGreeting(A, "b", FRAMES), listener()
    greet(a, b)
    assert a.ended
    assert b.ended
    assert (b.peer, b.kind, b.session) == ("a", FRAMES, a.session)
    beats, accepted = DialerGreeting(A, "b", BEATS, a.session), listener()
    greet(beats, accepted)
    assert (accepted.kind, accepted.session) == (BEATS, a.session)


def test_each_greeting_begins_another_session() -> None:
    sessions = set()
    for _ in range(3):
        a = DialerGreeting(A, "b", FRAMES)
        greet(a, listener())
        sessions.add(a.session)
    assert len(sessions) == 3


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (listener(secret=b"t" * 32), "lacks the secret"),
        (listener(name="c"), "looks for another process"),
        (listener(accepts=False), "not expected"),
    ],
)
def test_a_greeting_ends_where_the_sides_do_not_match(other: ListenerGreeting, reason: str) -> None:
    with pytest.raises(GreetingError, match=reason):
        greet(DialerGreeting(A, "b", FRAMES), other)
    assert not other.ended


def test_a_dialer_without_the_secret_is_refused() -> None:
    b = listener()
    b.feed(DialerGreeting(Identity(name="a", secret=b"t" * 32), "b", FRAMES).hello)
    with pytest.raises(GreetingError, match="lacks the secret"):
        b.feed(bytes(32))


def test_the_messages_of_an_earlier_greeting_are_worthless() -> None:
    a, b = DialerGreeting(A, "b", FRAMES), listener()
    challenge = b.feed(a.hello)
    proof = a.feed(challenge)
    b.feed(proof)
    again = listener()
    again.feed(a.hello)
    with pytest.raises(GreetingError, match="lacks the secret"):
        again.feed(proof)
    with pytest.raises(GreetingError, match="lacks the secret"):
        DialerGreeting(A, "b", FRAMES).feed(challenge)


def test_a_challenge_does_not_prove_the_dialer() -> None:
    b = listener()
    challenge = b.feed(DialerGreeting(A, "b", FRAMES).hello)
    with pytest.raises(GreetingError, match="lacks the secret"):
        b.feed(challenge[32:])


def test_the_first_wrong_byte_ends_a_greeting() -> None:
    b = listener()
    assert b.feed(b"pace") == b""
    with pytest.raises(GreetingError, match="another protocol"):
        b.feed(b"r")
