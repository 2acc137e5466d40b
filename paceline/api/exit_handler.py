"""Exit handler: what a script prints when an error ends it, and its exit status.

    PacelineError         its sentence; its status, 2 for the caller's mistake and otherwise 1
    Ctrl-C                nothing; 130
    a lost peer           the cause of that peer's end, in a line; its status
    any other error       its traceback; 1
    sys.exit(3)           nothing, but the peers get the reason; 3

The handler replaces `sys.excepthook` while the world is active. Where there are peers, the process
ends at once: threads that wait for lost peers would delay the interpreter's shutdown, and with it
the peers. Before that the newest state in memory is written to the disk.

The interpreter gives no exit hook the status of `sys.exit`, so the handler wraps `sys.exit` too.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from paceline.cluster.environment import Environment
from paceline.cluster.join import Joined
from paceline.cluster.supervision.process_end import ProcessEnd, SupervisedEnd
from paceline.cluster.supervision.worker import end_process
from paceline.errors import PacelineError

_INTERRUPTED = 130

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class ExitHandler:
    """Exit handler: reports the failure of a script and sets the exit status.

    Args:
        environment: what started the process.

    Attributes:
        failed: whether the script has failed.
        active: whether the world is open.
        rescue: writes the newest in-memory snapshot to disk.
        asked: the exit status that the script passed to `sys.exit`; 0 until then.
    """

    def __init__(self, environment: Environment) -> None:
        self.failed = self.active = False
        worker = environment.worker
        self._ending: ProcessEnd = ProcessEnd() if worker is None else SupervisedEnd(worker)
        self.rescue: Callable[[], object] = lambda: None
        self._alone = worker is None
        current = sys.excepthook
        self._before: _Hook = current._before if isinstance(current, ExitHandler) else current
        sys.excepthook = self
        self.asked = 0
        self._exit = sys.exit
        sys.exit = self._noted

    @staticmethod
    def installed() -> bool:
        """Tell whether this process has an open world."""
        return isinstance(sys.excepthook, ExitHandler) and sys.excepthook.active

    def install(self, joined: Joined) -> None:
        """Report failures of a process of this world from now on."""
        self._alone = self._alone and joined.members.world_size == 1
        self._ending, self.active = joined.process_end, True

    def uninstall(self) -> None:
        """Put the interpreter's own hooks back: the world ended well."""
        self.active = False
        if sys.excepthook is self:
            sys.excepthook = self._before
        if sys.exit == self._noted:
            sys.exit = self._exit

    def post_exit_status(self) -> None:
        """Post the reason for the peers, if the script ends with a status other than 0."""
        if self.asked:
            self._ending.post_exit_status(self.asked)

    def _noted(self, status: str | int | None = None, /) -> NoReturn:
        self.asked = status & 0xFF if isinstance(status, int) else int(status is not None)
        self._exit(status)

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Report why the script ends, and end the process."""
        status = self._report(error)
        if self._alone:
            sys.exit(status)
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()
        end_process(status)

    def at_exit(self, error: BaseException) -> None:
        """Report why the end of a script fails, and end the process.

        The interpreter is already shutting down; it would end with the script's own status.
        """
        end_process(self._report(error))

    def _report(self, error: BaseException) -> int:
        self.failed = True
        if isinstance(error, KeyboardInterrupt):
            status = _INTERRUPTED
        elif self._alone and not isinstance(error, PacelineError):
            self._before(type(error), error, error.__traceback__)
            status = 1
        else:
            status = self._ending.fail(error)
        self.rescue()
        return status
