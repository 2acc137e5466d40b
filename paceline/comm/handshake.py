"""Mutual authentication of a connection: challenge and response, by HMAC-SHA256 over both nonces.

    dialer                                               listener
      | magic | kind | nonce | session | names  ---->
                                   <----  | nonce | HMAC(secret, "listener", hello, nonce) |
      | HMAC(secret, "dialer", hello, nonce) |     ---->
                                                   <----  | 1 |

*hello* is the dialer's first message, which holds the names of both. Each side chooses a new nonce
for each connection, so a recorded greeting is worthless. The secret never travels. It is derived
from a token and from what the connection is for, so a greeting of one purpose or world proves
nothing to another.

A *session* joins two connections of a pair, such as the control line's for frames and for beats: it
is a value that both sides derive from the greeting of the first.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, TypeVar

FRAMES = b"F"  # kind of a connection
BEATS = b"B"
DATA = b"D"
NO_SESSION = bytes(16)
MAX_NAME = 254  # bytes
GREETING_S = 5.0  # for a greeting, where the dialer may dial anew
MAX_UNAUTHENTICATED = 64  # connections to a listener, beyond those that it expects
_MAGIC = b"pacectl1"
_HELLO = struct.Struct("!8s1s32s16s255p255p")
_CHALLENGE = struct.Struct("!32s32s")
_PROOF_SIZE = 32
_WELCOME = b"\x01"
_T = TypeVar("_T")


class GreetingError(Exception):
    """Error: a greeting failed: another secret, an unexpected process, or a connection's end."""


class DialError(Exception):
    """Error: a dialed connection has failed.

    Attributes:
        peer: the listener's name.
        reason: `GreetingError`, if the process there is another one; or OSError.
    """

    def __init__(self, peer: str, reason: Exception) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One side of connections.

    Attributes:
        name: its name, by which the others know it; at most `MAX_NAME` bytes.
        secret: what all of them know, and no other process.
    """

    name: str
    secret: bytes = field(repr=False)


def secret_of(token: str, purpose: str) -> bytes:
    """Return the secret of the connections for a purpose, among the processes with a token."""
    return hmac.digest(token.encode(), f"paceline {purpose}".encode(), "sha256")


class Greeting(ABC):
    """Greeting of one connection, as one side sees it; it does no input or output.

    Attributes:
        peer: the other side's name; "" until it is known.
        kind: of the connection; b"" until it is known.
        session: of a connection for beats, the session that it belongs to; of one for frames, the
            session that it begins, once the greeting has ended.
        missing: the number of bytes that this side still expects in the present message.
        ended: whether both sides have authenticated each other.
    """

    def __init__(self, secret: bytes, first_message_size: int) -> None:
        self._secret = secret
        self.peer = ""
        self.kind = b""
        self.session = NO_SESSION
        self.missing = first_message_size
        self.ended = False
        self._message = b""
        self._transcript = b""  # the hello and the listener's nonce

    def feed(self, data: bytes) -> bytes:
        """Read at most `missing` bytes; return what to send.

        Raises:
            GreetingError: the other side is not authentic.
        """
        assert len(data) <= self.missing
        self._message += data
        self.missing -= len(data)
        if not self._may_begin(self._message):
            raise GreetingError("the first bytes are those of another protocol")
        if self.missing:
            return b""
        message = self._message
        self._message = b""
        return self._read(message)

    def _may_begin(self, message: bytes) -> bool:
        """Return whether a message may begin with these bytes."""
        return True

    @abstractmethod
    def _read(self, message: bytes) -> bytes:
        """Read a message; set `missing` to the next one's size; return the answer."""

    def _digest(self, side: bytes) -> bytes:
        return hmac.digest(self._secret, side + b"\0" + self._transcript, "sha256")

    def _end(self) -> None:
        self.ended = True
        if self.kind == FRAMES:
            self.session = self._digest(b"session")[: len(NO_SESSION)]


class DialerGreeting(Greeting):
    """Greeting as the dialer's side sees it.

    Args:
        me: this side.
        peer: the name of the expected listener.
        kind: `FRAMES`, `BEATS` or `DATA`.
        session: of a connection for beats, the session of the pair's other connection.

    Attributes:
        hello: the first message, to be sent by the caller.
    """

    def __init__(
        self, me: Identity, peer: str, kind: bytes = DATA, session: bytes = NO_SESSION
    ) -> None:
        super().__init__(me.secret, _CHALLENGE.size)
        self.peer = peer
        self.kind = kind
        self.session = session
        nonce = secrets.token_bytes(32)
        self.hello = _HELLO.pack(_MAGIC, kind, nonce, session, me.name.encode(), peer.encode())
        self._challenged = False

    def _read(self, message: bytes) -> bytes:
        if self._challenged:
            if message != _WELCOME:
                raise GreetingError("the listener's last message is wrong")
            self._end()
            return b""
        nonce, proof = _CHALLENGE.unpack(message)
        self._transcript = self.hello + nonce
        if not hmac.compare_digest(proof, self._digest(b"listener")):
            raise GreetingError(f"the process there is not {self.peer}: it lacks the secret")
        self._challenged = True
        self.missing = len(_WELCOME)
        return self._digest(b"dialer")


class ConnectionPolicy(Protocol):
    """Protocol of what decides whether an authenticated dialer's connection is wanted."""

    def accepts(self, greeting: Greeting) -> bool:
        """Return whether this side wants the connection of an authenticated greeting."""


class ListenerGreeting(Greeting):
    """Greeting as the listener's side sees it.

    Args:
        me: this side.
        policy: decides on the connection.
    """

    def __init__(self, me: Identity, policy: ConnectionPolicy) -> None:
        super().__init__(me.secret, _HELLO.size)
        self._name = me.name
        self._policy = policy

    def _may_begin(self, message: bytes) -> bool:
        return bool(self._transcript) or _MAGIC.startswith(message[: len(_MAGIC)])

    def _read(self, message: bytes) -> bytes:
        if not self._transcript:
            return self._challenge(message)
        if not hmac.compare_digest(message, self._digest(b"dialer")):
            raise GreetingError(f"the process that claims to be {self.peer!r} lacks the secret")
        if not self._policy.accepts(self):
            raise GreetingError(f"a connection of {self.peer!r} is not expected")
        self._end()
        return _WELCOME

    def _challenge(self, hello: bytes) -> bytes:
        _, kind, _, session, dialer, listener = _HELLO.unpack(hello)
        if listener != self._name.encode():
            raise GreetingError("the dialer looks for another process")
        if kind not in (FRAMES, BEATS, DATA):
            raise GreetingError("the kind of the connection is unknown")
        try:
            self.peer = dialer.decode()
        except UnicodeDecodeError as error:
            raise GreetingError("the dialer's name is no text") from error
        self.kind = kind
        self.session = session
        nonce = secrets.token_bytes(32)
        self._transcript = hello + nonce
        self.missing = _PROOF_SIZE
        return _CHALLENGE.pack(nonce, self._digest(b"listener"))


def advance(stream: socket.socket, greeting: Greeting) -> bool:
    """Read what has come of a greeting, and answer it; return whether the greeting has ended.

    Raises:
        GreetingError: the other side is not authentic, or has closed the connection.
        OSError: the connection has failed; TimeoutError, if nothing came within its timeout.
    """
    try:
        data = stream.recv(greeting.missing)
    except BlockingIOError:
        return False
    if not data:
        raise GreetingError("it closed the connection")
    answer = greeting.feed(data)
    if answer and stream.send(answer) < len(answer):  # for which a new connection has room
        raise GreetingError("the connection takes no bytes")
    return greeting.ended


def authenticate(stream: socket.socket, me: Identity, peer: str, deadline: float) -> None:
    """Prove both sides' knowledge of the secret, on a connection that this side has dialed.

    Args:
        stream: the connection.
        me: this side.
        peer: the name of the expected listener.
        deadline: the moment at which to give up, by the monotonic clock.

    Raises:
        GreetingError: the process there is not the peer.
        OSError: the connection has failed; TimeoutError at the deadline.
    """
    greeting = DialerGreeting(me, peer)
    stream.sendall(greeting.hello)
    ended = False
    while not ended:
        stream.settimeout(max(0.01, deadline - time.monotonic()))
        ended = advance(stream, greeting)


class Handshakes:
    """Handshakes that run side by side: with the dialers of a listening socket, and with listeners.

    None delays another. A greeting may take its time, because a process may be busy for longer than
    any limit here. That few dialers are unauthenticated at once bounds descriptors and memory.

    Args:
        server: the listening socket; doesn't block from now on.
        me: this side.
        expected: names of the dialers that are wanted, which may change; None: all.
        count: number of dialers that may rightly come at once.
    """

    def __init__(
        self,
        server: socket.socket,
        me: Identity,
        expected: Container[str] | None,
        count: int,
    ) -> None:
        self._server = server
        self._me = me
        self._expected = expected
        self._limit = count + MAX_UNAUTHENTICATED
        self._greetings: dict[socket.socket, Greeting] = {}
        self._dialers: dict[socket.socket, str] = {}  # their addresses, in order of age
        self._selector = selectors.PollSelector()  # has no descriptor that a child could inherit
        self._selector.register(server, selectors.EVENT_READ)
        server.setblocking(False)

    def dial(self, stream: socket.socket, peer: str) -> None:
        """Greet the listener of a connection, from which `next` may return.

        Raises:
            OSError: the connection has failed.
        """
        greeting = DialerGreeting(self._me, peer)
        self._add(stream, greeting)
        stream.sendall(greeting.hello)  # for which a new connection has room

    def next(self, deadline: float = inf) -> tuple[str, socket.socket]:
        """Return the name of the next authenticated process, and the connection with it.

        Raises:
            DialError: a dialed connection has failed.
            TimeoutError: the moment of the deadline, by the monotonic clock, has passed.
            OSError: the listening socket was shut down.
        """
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(None if left == inf else left):
                stream = key.fileobj
                assert isinstance(stream, socket.socket)
                if stream is self._server:
                    self._accept()
                elif stream in self._greetings and self._advance(stream):
                    stream.settimeout(GREETING_S)
                    return self._forget(stream).peer, stream
        raise TimeoutError("no authenticated process has connected in time")

    def accepts(self, greeting: Greeting) -> bool:
        """Return whether a dialer of this name, which it has proved, is expected."""
        return self._expected is None or greeting.peer in self._expected

    def close(self) -> None:
        """Close the connections whose greeting hasn't ended."""
        for stream in list(self._greetings):
            self._drop(stream)
        self._selector.close()

    def _accept(self) -> None:
        try:
            stream, address = self._server.accept()
        except (BlockingIOError, ConnectionError):  # the dialer has gone
            return
        self._add(stream, ListenerGreeting(self._me, self))
        self._dialers[stream] = address[0] if address else ""  # a local socket's has none
        if len(self._dialers) > self._limit:
            self._drop(first_to_drop(self._dialers))

    def _add(self, stream: socket.socket, greeting: Greeting) -> None:
        stream.setblocking(False)
        self._greetings[stream] = greeting
        self._selector.register(stream, selectors.EVENT_READ)

    def _advance(self, stream: socket.socket) -> bool:
        try:
            return advance(stream, self._greetings[stream])
        except (GreetingError, OSError) as error:
            dialed = stream not in self._dialers
            greeting = self._drop(stream)
            if dialed:
                raise DialError(greeting.peer, error) from error
            return False

    def _drop(self, stream: socket.socket) -> Greeting:
        greeting = self._forget(stream)
        stream.close()
        return greeting

    def _forget(self, stream: socket.socket) -> Greeting:
        self._selector.unregister(stream)
        self._dialers.pop(stream, None)
        return self._greetings.pop(stream)


def first_to_drop(addresses: Mapping[_T, str]) -> _T:
    """Return which of too many unauthenticated connections ends.

    It is the oldest of the address that has the most, so that a flood from one doesn't end the
    connections from others.

    Args:
        addresses: the connections' addresses, in order of age.
    """
    most = Counter(addresses.values()).most_common(1)[0][0]
    return next(one for one, address in addresses.items() if address == most)
