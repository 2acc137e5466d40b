"""Exit handler: what a script prints when an error ends it, and its exit status.

    PacelineError         its sentence; its status, 2 for the caller's mistake and otherwise 1
    Ctrl-C                nothing; 130
    a lost peer           the cause of that peer's end, in a line; its status
    a dead data loader    a sentence, wherever torch raised it; 1
    any other error       its traceback; 1
    sys.exit(3)           nothing, but the peers get the reason; 3

The constructor replaces `sys.excepthook`, and `sys.exit`, whose status no exit hook of the
interpreter gets. It does so before the process joins its world, so that failures of `join` are
reported too. `restore_hooks` puts both back after a world that closed well; after a failure they
stay.

An interactive interpreter, such as a notebook's kernel, shows errors itself and outlives them.
There nothing is replaced, and the process isn't ended.

Where there are peers, the process ends at once: threads that wait for lost peers would delay the
interpreter's shutdown, and with it the peers. Before that the newest state in memory is written to
the disk.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from paceline.api.open_world import OpenWorld
from paceline.cluster.environment import Environment
from paceline.cluster.join import Joined
from paceline.cluster.print_message import print_message
from paceline.cluster.supervision.process_end import ProcessEnd, SupervisedEnd
from paceline.cluster.supervision.worker import end_process
from paceline.data.map_style_loader import explained_death
from paceline.errors import PacelineError

_INTERRUPTED = 130

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class ExitHandler:
    """Exit handler: reports the failure of a script and sets the exit status.

    Args:
        environment: what started the process.

    Attributes:
        failed: whether the script has failed.
        world: the world of the script, whose state is saved; None: it has not joined yet.
        requested_status: the exit status that the script passed to `sys.exit`; 0 until then.
    """

    def __init__(self, environment: Environment) -> None:
        self.failed = False
        self._interactive = environment.interactive
        worker = environment.worker
        self._process_end: ProcessEnd = ProcessEnd() if worker is None else SupervisedEnd(worker)
        self.world: OpenWorld | None = None
        self._alone = worker is None
        current = sys.excepthook
        self._previous_hook: _Hook = (
            current._previous_hook if isinstance(current, ExitHandler) else current
        )
        self.requested_status = 0
        self._exit = sys.exit
        if not self._interactive:
            sys.excepthook = self
            sys.exit = self._exit_recording_status

    def activate(self, joined: Joined) -> None:
        """Report failures as those of a process of this world from now on."""
        self._alone = self._alone and joined.group.size == 1
        self._process_end = joined.process_end

    def restore_hooks(self) -> None:
        """Put back the hooks that the constructor replaced: the world ended well."""
        if sys.excepthook is self:
            sys.excepthook = self._previous_hook
        if sys.exit == self._exit_recording_status:
            sys.exit = self._exit

    def post_exit_status(self) -> None:
        """Post the reason for the peers, if the script ends with a status other than 0."""
        if self.requested_status:
            self._process_end.post_exit_status(self.requested_status)

    def _exit_recording_status(self, status: str | int | None = None, /) -> NoReturn:
        self.requested_status = (
            status & 0xFF if isinstance(status, int) else int(status is not None)
        )
        self._exit(status)

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
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

        The interpreter is already shutting down; it would end with the script's own status. An
        interactive one has other exit hooks to run, which save its history.
        """
        status = self._report(error)
        if not self._interactive:
            end_process(status)

    def _report(self, error: BaseException) -> int:
        self.failed = True
        error = explained_death(error)
        if isinstance(error, KeyboardInterrupt):
            status = _INTERRUPTED
        elif self._alone and not isinstance(error, PacelineError):
            self._previous_hook(type(error), error, error.__traceback__)
            status = 1
        else:
            status = self._process_end.fail(error)
        if self.world is not None and (saved := self.world.rescue(error)):
            print_message(saved)
        return status
