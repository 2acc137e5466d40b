"""Mutual authentication of a connection: challenge and response, by HMAC-SHA256 over both nonces.

    dialer                                               listener
      | magic | purpose | nonce | session | names  ---->
                                   <----  | nonce | HMAC(secret, "listener", hello, nonce) |
      | HMAC(secret, "dialer", hello, nonce) |     ---->
                                                   <----  | 1 |

*hello* is the dialer's first message, which holds the names of both. Each side chooses a new nonce
for each connection, so a recorded greeting is worthless. The secret never travels.

A pair has two connections. The *session* of the second, for beats, is a value that both sides
derive from the greeting of the first, for frames.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable

FRAMES = b"F"  # purpose of a connection
BEATS = b"B"  # likewise
NO_SESSION = bytes(16)
MAX_NAME = 254  # bytes
_MAGIC = b"pacectl1"
_HELLO = struct.Struct("!8s1s32s16s255p255p")
_CHALLENGE = struct.Struct("!32s32s")
_PROOF_SIZE = 32
_WELCOME = b"\x01"


class GreetingError(Exception):
    """Error: the other end of a connection is not a member, or not the expected one."""


class Greeting(ABC):
    """Greeting of one connection, as one side sees it; it does no input or output.

    Attributes:
        peer: the other side's name; "" until it is known.
        purpose: what the connection is for; b"" until it is known.
        session: of a connection for beats, the session that it belongs to; of one for frames, the
            session that it begins, once the greeting has ended.
        missing: the number of bytes that this side still expects in the present message.
        ended: whether both sides have authenticated each other.
    """

    def __init__(self, secret: bytes, first_message_size: int) -> None:
        self._secret = secret
        self.peer = ""
        self.purpose = b""
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
        if self.purpose == FRAMES:
            self.session = self._digest(b"session")[: len(NO_SESSION)]


class DialerGreeting(Greeting):
    """Greeting as the dialer's side sees it.

    Args:
        secret: what all members know.
        name: this side's name.
        peer: the name of the expected listener.
        purpose: `FRAMES` or `BEATS`.
        session: of a connection for beats, the session of the pair's other connection.

    Attributes:
        hello: the first message, to be sent by the caller.
    """

    def __init__(
        self, secret: bytes, name: str, peer: str, purpose: bytes, session: bytes = NO_SESSION
    ) -> None:
        super().__init__(secret, _CHALLENGE.size)
        self.peer = peer
        self.purpose = purpose
        self.session = session
        nonce = secrets.token_bytes(32)
        self.hello = _HELLO.pack(_MAGIC, purpose, nonce, session, name.encode(), peer.encode())
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


class ListenerGreeting(Greeting):
    """Greeting as the listener's side sees it.

    Args:
        secret: what all members know.
        name: this side's name.
        accepts: called with an authenticated greeting; returns whether this side wants the
            connection.
    """

    def __init__(self, secret: bytes, name: str, accepts: Callable[[Greeting], bool]) -> None:
        super().__init__(secret, _HELLO.size)
        self._name = name
        self._accepts = accepts

    def _may_begin(self, message: bytes) -> bool:
        return bool(self._transcript) or _MAGIC.startswith(message[: len(_MAGIC)])

    def _read(self, message: bytes) -> bytes:
        if not self._transcript:
            return self._challenge(message)
        if not hmac.compare_digest(message, self._digest(b"dialer")):
            raise GreetingError(f"the process that claims to be {self.peer!r} lacks the secret")
        if not self._accepts(self):
            raise GreetingError(f"a connection of {self.peer!r} is not expected")
        self._end()
        return _WELCOME

    def _challenge(self, hello: bytes) -> bytes:
        _, purpose, _, session, dialer, listener = _HELLO.unpack(hello)
        if listener != self._name.encode():
            raise GreetingError("the dialer looks for another process")
        if purpose not in (FRAMES, BEATS):
            raise GreetingError("the purpose of the connection is unknown")
        try:
            self.peer = dialer.decode()
        except UnicodeDecodeError as error:
            raise GreetingError("the dialer's name is no text") from error
        self.purpose = purpose
        self.session = session
        nonce = secrets.token_bytes(32)
        self._transcript = hello + nonce
        self.missing = _PROOF_SIZE
        return _CHALLENGE.pack(nonce, self._digest(b"listener"))
