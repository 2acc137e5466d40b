"""The exceptions of Paceline: a tree below `PacelineError`, and templates of their sentences.

A message is one or two sentences: the value, the rule, the remedy. `status` is the exit status of a
command that ends with the error: 2 for a mistake of the caller, 1 for a failure of the world.

    PacelineError
    ├── ConfigError (also a ValueError)   flags, permissions, passwords, ranks that disagree
    ├── CommError                         a peer or the network
    │   ├── PeerLost                      a peer's connection ended
    │   └── CommTimeout                   a peer is silent for longer than a limit
    ├── DataError                         a database, a record, an image
    ├── CheckpointError                   a file of weights or of a run's state
    └── Diverged                          the loss became NaN, or exploded

A `Message` names an option as `{--bucket_mb}`. The surface that shows the error substitutes its own
name: `--bucket_mb` on the command line, `bucket_mb` in the library.
"""

from __future__ import annotations

from collections.abc import Callable
from string import Formatter


def as_flag(option: str) -> str:
    """Return the name of an option on the command line: `--bucket_mb`."""
    return f"--{option}"


class _Names(dict[str, str]):
    """Mapping from placeholders to the names of options on one surface, for `Formatter`."""

    def __init__(self, name_of: Callable[[str], str]) -> None:
        super().__init__()
        self._name_of = name_of

    def __missing__(self, key: str) -> str:
        return self._name_of(key.removeprefix("--"))


class Message:
    """Template of a sentence that names options; the surface that shows it renders it.

    Args:
        template: text with placeholders: `{--name}` for an option, `{}` or `{0}` for a value.
        values: of the placeholders; a `Message` among them is rendered too.
    """

    def __init__(self, template: str, *values: object) -> None:
        self._template, self._values = template, values

    def render(self, name_of: Callable[[str], str] = as_flag) -> str:
        """Return the sentence; `name_of` returns the name of an option."""
        values = [v.render(name_of) if isinstance(v, Message) else v for v in self._values]
        return Formatter().vformat(self._template, values, _Names(name_of))

    def __str__(self) -> str:
        return self.render()


class PacelineError(Exception):
    """Base class of Paceline's errors; the message states the cause and the remedy.

    Args:
        message: the sentence.

    Attributes:
        name_of: returns the name of an option on the surface that shows the error.
    """

    status = 1

    def __init__(self, message: str | Message = "", *more: object) -> None:
        super().__init__(message, *more)
        self.name_of: Callable[[str], str] = as_flag

    def __str__(self) -> str:
        message = self.args[0] if self.args else ""
        return message.render(self.name_of) if isinstance(message, Message) else str(message)


class ConfigError(PacelineError, ValueError):
    """Mistake of the caller: a value breaks a rule; nothing has been written.

    Args:
        message: the sentence, where it concerns no single option.
        flag: the option, without dashes.
        value: the value given, as the message shows it.
        rule: what must be true of the value.
        remedy: what to do.
    """

    status = 2

    def __init__(
        self,
        message: str | Message = "",
        *,
        flag: str = "",
        value: object = "",
        rule: str | Message = "",
        remedy: str | Message = "",
    ) -> None:
        self.flag, self.value, self.rule, self.remedy = flag, value, rule, remedy
        if flag:
            given = f" {value}" if f"{value}" else ""
            ending = Message("; {}.", remedy) if f"{remedy}" else "."
            message = Message(f"{{--{flag}}}{{}}: {{}}{{}}", given, rule, ending)
        super().__init__(message)


class CommError(PacelineError):
    """Failure of the exchange with other processes."""


class PeerLost(CommError):
    """Loss of a peer: its connection ended during an operation.

    Args:
        message: the sentence, where the fields are unknown.
        rank: the rank that noticed the loss.
        peer: the lost rank.
        operation: the operation, with its step if there is one: "bucket 3 in step 7".
        cause: why the connection ended.
    """

    def __init__(
        self,
        message: str | Message = "",
        *,
        rank: int | None = None,
        peer: int | None = None,
        operation: str = "",
        cause: str = "",
    ) -> None:
        self.rank, self.peer, self.operation, self.cause = rank, peer, operation, cause
        if peer is not None:
            message = f"rank {rank} lost rank {peer} in {operation}: {cause}."
        super().__init__(message)

    def during(self, operation: str) -> PeerLost:
        """Return the same loss, noticed during another operation."""
        if self.peer is None:
            return self
        return PeerLost(rank=self.rank, peer=self.peer, operation=operation, cause=self.cause)


class CommTimeout(CommError):
    """Timeout: a peer was silent for longer than an operation's limit."""


class DataError(PacelineError):
    """Unreadable data: a database, a record or an image."""


class CheckpointError(PacelineError):
    """Unreadable or unwritable file of weights or of a run's state."""


class Diverged(PacelineError):
    """Divergence: the loss became NaN or infinite, or exceeded its limit."""
