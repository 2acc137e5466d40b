"""What a script says when an error ends it: a sentence or a traceback, once, and the status.

    error of ours         its sentence; its status, 2 for the caller's mistake and 1 for the world's
    Ctrl-C                nothing; 130
    a lost peer           what ended that peer, in a line; its status
    anything else         its traceback; 1
    sys.exit(3)           nothing, but the peers learn of it; 3

It takes the place of `sys.excepthook` as long as the world stands. Where there are peers the
process leaves at once, without the interpreter's farewell: threads that wait for lost peers would
keep the others waiting. What a run has in memory is written to the disk before.

Nothing tells a process at its end what `sys.exit` was called with, so that is listened to as well.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from paceline.cluster.environment import Environment
from paceline.cluster.join import Joined
from paceline.cluster.supervision.process_end import SingleProcessEnd, SupervisedEnd
from paceline.errors import PacelineError

_INTERRUPTED = 130

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class ExitHandler:
    """Ends a process whose script failed.

    Args:
        environment: who started the process.

    Attributes:
        failed: the script has failed.
        standing: its world stands.
        rescue: writes what a run has in memory to the disk.
        asked: the status that the script asked to end with, by `sys.exit`; 0 until then.
    """

    def __init__(self, environment: Environment) -> None:
        self.failed = False
        self.standing = False
        worker = environment.worker
        self._ending: SingleProcessEnd | SupervisedEnd | Joined
        self._ending = SingleProcessEnd() if worker is None else SupervisedEnd(worker)
        self.rescue: Callable[[], object] = _nothing
        self._alone = worker is None
        current = sys.excepthook
        self._before: _Hook = current._before if isinstance(current, ExitHandler) else current
        sys.excepthook = self
        self.asked = 0
        self._exit = sys.exit
        sys.exit = self._noted

    @staticmethod
    def spoken_for() -> bool:
        """Tell whether a world stands in this process."""
        return isinstance(sys.excepthook, ExitHandler) and sys.excepthook.standing

    def stand(self, joined: Joined) -> None:
        """Speak for a process of a world that stands now."""
        self._alone = self._alone and joined.members.world_size == 1
        self._ending, self.standing = joined, True

    def withdraw(self) -> None:
        """Let another speak: the world ended well."""
        self.standing = False
        if sys.excepthook is self:
            sys.excepthook = self._before
        if sys.exit == self._noted:
            sys.exit = self._exit

    def warn(self) -> None:
        """Tell the peers why they are about to lose this process, if its script wants to fail."""
        if self.asked:
            self._ending.warn(self.asked)

    def _noted(self, status: str | int | None = None, /) -> NoReturn:
        self.asked = status & 0xFF if isinstance(status, int) else int(status is not None)
        self._exit(status)

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Say why the script ends, and end the process."""
        status = self._speak(error)
        if self._alone:
            sys.exit(status)
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()
        _leave(status)

    def at_exit(self, error: BaseException) -> None:
        """Say why a script that came to its end fails nevertheless, and end the process.

        The interpreter's farewell has begun, which would end with the script's own status.
        """
        _leave(self._speak(error))

    def _speak(self, error: BaseException) -> int:
        self.failed = True
        status = self._say(error)
        self.rescue()
        return status

    def _say(self, error: BaseException) -> int:
        if isinstance(error, KeyboardInterrupt):
            return _INTERRUPTED
        if self._alone and not isinstance(error, PacelineError):
            self._before(type(error), error, error.__traceback__)
            return 1
        return self._ending.fail(error)


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _nothing() -> None:
    """Write nothing: there is no run yet."""
