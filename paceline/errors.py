"""What can go wrong, in the caller's words or the world's.

Every message is one or two sentences: what was given, what the rule is, what to do. `status` is
the exit status of a command that ends with it: 2 for the caller's mistake, 1 for the world's.

    PacelineError
    ├── ConfigError (also a ValueError)   flags, permissions, passwords, ranks that disagree
    ├── CommError                         a peer or the network
    │   ├── PeerLost                      a peer's connection ended
    │   └── CommTimeout                   a peer said nothing for too long
    ├── DataError                         a database, a record, an image
    ├── CheckpointError                   a file of weights or of a run's state
    └── Diverged                          the loss isn't a number any more, or exploded
"""

from __future__ import annotations


class PacelineError(Exception):
    """Whatever Paceline reports to a person; its text is a sentence that they can act on."""

    status = 1


class ConfigError(PacelineError, ValueError):
    """A value that the caller gave breaks a rule; nothing has been written."""

    status = 2


class CommError(PacelineError):
    """The exchange with other processes failed."""


class PeerLost(CommError):
    """A peer's connection ended in the middle of an operation."""


class CommTimeout(CommError):
    """A peer said nothing within an operation's limit."""


class DataError(PacelineError):
    """A database, a record or an image can't be read."""


class CheckpointError(PacelineError):
    """A file of weights or of a run's state can't be read or written."""


class Diverged(PacelineError):
    """Training doesn't learn any more: the loss is not a number, or far too large."""
