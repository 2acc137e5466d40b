"""Exceptions: mistakes of the caller (exit status 2); failures of peers, disk or data (1).

Every message is one or two sentences: what was given, what the rule is, what to do. `status` is
the exit status of a command that ends with it: 2 for the caller's mistake, 1 for the world's.

    PacelineError
    ├── ConfigError (also a ValueError)   flags, permissions, passwords, ranks that disagree
    ├── CommError                         a peer or the network
    │   ├── PeerLost                      a peer's connection ended
    │   └── CommTimeout                   a peer said nothing for too long
    ├── DataError                         a database, a record, an image
    ├── CheckpointError                   a file of weights or of a run's state
    ├── ReplicasDiffer                    the ranks' states aren't equal any more
    ├── ServerLost                        the averaging server: a run doesn't continue without it
    ├── IdleTimeout                       a rank worked outside a step for too long
    └── Diverged                          the loss became NaN, or exploded

A message names an option as `{--bucket_mb}` in a `Message`; the surface that shows the error says
how options are called there: `--bucket_mb` on the command line, `bucket_mb` in the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from string import Formatter


def as_flag(option: str) -> str:
    """Call an option as the command line does: `--bucket_mb`."""
    return f"--{option}"


class Message(str):
    """Message that mentions options: commands show them as flags, the Python API as arguments.

    Args:
        template: text in which `{--name}` stands for an option, and `{}` or `{0}` for a value.
        values: values of the template's `{}` fields, in order.
    """

    _template: str
    _values: tuple[object, ...]

    def __new__(cls, template: str, *values: object) -> Message:
        message = super().__new__(cls, _rendered(template, values, as_flag))
        message._template = template
        message._values = values
        return message

    def render(self, name_of: Callable[[str], str] = as_flag) -> str:
        """Return the sentence, options called as `name_of` says."""
        return _rendered(self._template, self._values, name_of)


def _rendered(template: str, values: tuple[object, ...], name_of: Callable[[str], str]) -> str:
    texts = [v.render(name_of) if isinstance(v, Message) else v for v in values]
    fields = {field for _, field, _, _ in Formatter().parse(template) if field}
    options = {field: name_of(field.removeprefix("--")) for field in fields}
    return Formatter().vformat(template, texts, options)


def many(count: int, noun: str) -> str:
    """Write a number of things: "1 step", "2,000 steps", "2 classes"."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "tch")) else "s"
    return f"{count:,} {noun}{ending}"


class PacelineError(Exception):
    """Base class of errors that a command reports in one sentence, without a traceback.

    Args:
        message: the error's sentence.

    Attributes:
        name_of: maps an option's name to its spelling (--flag or argument) in the interface that
            shows the error.
    """

    status = 1

    def __init__(self, message: str | Message = "", *more: object) -> None:
        super().__init__(str(message), *more)  # tyro requires a string
        self._message = message
        self.name_of: Callable[[str], str] = as_flag

    def __str__(self) -> str:
        message = self._message
        return message.render(self.name_of) if isinstance(message, Message) else message


@contextmanager
def options_named(name_of: Callable[[str], str]) -> Iterator[None]:
    """Let errors that leave the block spell options as `name_of` says."""
    try:
        yield
    except PacelineError as error:
        error.name_of = name_of
        raise


class ConfigError(PacelineError, ValueError):
    """Error of a value that the caller gave: it breaks a rule, and nothing has been written.

    Args:
        message: the error's sentence, if the error isn't about one option.
        flag: the option's name, without dashes.
        value: the value given, as the message shows it.
        rule: the rule that the value breaks.
        remedy: what the caller can do.
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
        self.flag = flag
        self.value = value
        self.rule = rule
        self.remedy = remedy
        if flag:
            given = f" {value}" if f"{value}" else ""
            ending = Message("; {}.", remedy) if f"{remedy}" else "."
            message = Message(f"{{--{flag}}}{{}}: {{}}{{}}", given, rule, ending)
        super().__init__(message)


@contextmanager
def user_named_file() -> Iterator[None]:
    """Let errors of a file that the user names, such as a torn one, have a mistake's status, 2."""
    try:
        yield
    except CheckpointError as error:
        error.status = ConfigError.status
        raise


class CommError(PacelineError):
    """Error of communication with other processes.

    Attributes:
        of_call: whether it is of a call that all ranks must make, and a peer perhaps didn't make.
            Where several ranks wait for each other, that tells more than the others' errors.
    """

    of_call = False


class PeerLost(CommError):
    """Error of an operation during which a peer's connection ended.

    Args:
        message: the error's sentence, if none of the other fields is known.
        rank: the rank that detected the loss.
        peer: the rank that was lost; None if the transport doesn't report it.
        operation: the interrupted operation, with the step if there is one, such as "bucket 3 in
            step 7".
        cause: why the connection ended.
        name: what the lost peer is called; "": by its rank.

    Attributes:
        remedy: what a command's user can do, a sentence.
    """

    remedy = "Check the output of the lost process, and start the same command again."

    def __init__(
        self,
        message: str | Message = "",
        *,
        rank: int | None = None,
        peer: int | None = None,
        operation: str = "",
        cause: str = "",
        name: str = "",
    ) -> None:
        self.rank = rank
        self.peer = peer
        self.operation = operation
        self.cause = cause
        self.name = name
        if operation:
            lost = name or ("a peer" if peer is None else f"rank {peer}")
            message = f"rank {rank} lost {lost} in {operation}: {cause}."
        super().__init__(message)

    def during(self, operation: str) -> PeerLost:
        """Return the same loss, noticed in another operation."""
        if not self.operation:
            return self
        return self._changed(operation=operation)

    def named(self, name: str) -> PeerLost:
        """Return the same loss, of a peer with a name."""
        return self._changed(name=name) if self.operation else self

    def _changed(self, *, operation: str = "", name: str = "") -> PeerLost:
        changed = PeerLost(
            rank=self.rank,
            peer=self.peer,
            operation=operation or self.operation,
            cause=self.cause,
            name=name or self.name,
        )
        changed.of_call = self.of_call
        return changed


class CommTimeout(CommError):
    """Error of an operation that reached its timeout without an answer from a peer."""


class DataError(PacelineError):
    """Error of a database, a record or an image that can't be read."""


class CheckpointError(PacelineError):
    """Error of a checkpoint or a file of weights that can't be read or written."""


class RankStateError(PacelineError):
    """Error of the ranks' parts of a divided state, which don't make up the whole of one snapshot.

    Args:
        reason: what is wrong with the parts, a clause.
        parameter: name of the parameter, if the reason is about one.
        start: index of the first of its values that the reason is about.
        stop: index behind the last one.
    """

    def __init__(self, reason: str, *, parameter: str = "", start: int = 0, stop: int = 0) -> None:
        self.reason = reason
        self.parameter = parameter
        self.start = start
        self.stop = stop
        of = f" of values {start:,} to {stop - 1:,} of {parameter}" if parameter else ""
        super().__init__(f"The state{of} can't be merged from the parts of all ranks: {reason}.")


class ReplicasDiffer(PacelineError):
    """Error of a run whose replicas differ between ranks where they ought to be equal."""


class ServerLost(PacelineError):
    """Error of a run whose averaging server was lost: no generation of the world follows."""


class IdleTimeout(PacelineError):
    """Error of a run that waits for a rank which works outside a step for too long: it ends."""


class Diverged(PacelineError):
    """Error of a diverged run: the loss is NaN, infinite or too large, or gradients overflow."""
