"""The end of a world: closed by its script or at the exit, stopped by a signal, or after an error.

with paceline.join(…) as world:     at the block's end
world.close()                       where the script calls it
(neither)                           when the interpreter exits, or where a notebook joins again
SIGTERM, Ctrl-C, another rank's     `SystemExit` at the next step boundary; the state is saved
an error                            the script ends; the exit handler reports it
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NoReturn

from paceline.api.argument_names import as_argument
from paceline.api.open_world import set_open_world
from paceline.api.sample_position import SamplePosition
from paceline.api.session import Session
from paceline.cluster.supervision.supervisor import print_message, saved_sentence
from paceline.errors import CommError, ConfigError, PacelineError
from paceline.generation.run import Run
from paceline.run.steps import Stop

_TERMINATED = 143  # the status where another process received the signal


class WorldEnd:
    """The end of a world, and the reason for it that the script and its peers get.

    Args:
        session: the session, whose resources end with the world.
        run: the run.
        position: the run's position.

    Attributes:
        closed: whether the world has ended.
        stopped: whether a request to stop has ended the script's loop; the state is saved.
        interactive: whether the interpreter is interactive, and outlives the world.
    """

    def __init__(self, session: Session, run: Run, position: SamplePosition) -> None:
        self._session = session
        self._run = run
        self._position = position
        self._close: Callable[[], None] = lambda: None
        self._printed: int | None = None
        self.closed = self.stopped = False
        self.interactive = session.interactive_signals.enabled

    def close_at_exit(self, close: Callable[[], None]) -> None:
        """Close the world at the end of the script, unless it is closed before."""
        self._close = close
        atexit.register(self._close_or_report)

    def require_open(self, call: str) -> None:
        """Raise ConfigError if the world is closed."""
        if self.closed:
            raise ConfigError(f"{call} was used after world.close(): call paceline.join() again.")

    def release(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all resources; the exit handler still reports the error, if there is one."""
        if not self.closed:
            self.closed = True
            atexit.unregister(self._close_or_report)
            set_open_world(None)
            self._session.resources.__exit__(kind, error, traceback)

    @contextmanager
    def saved_if_interrupted(self, save: Callable[[], int | None]) -> Iterator[None]:
        """Let an interrupt in an interactive interpreter end a step's block after the step.

        Args:
            save: saves the state; returns the number of steps in the newest file, if there is one.
        """
        try:
            with self._session.interactive_signals.postponed():
                yield
        except KeyboardInterrupt:
            self.print_saved(save())
            raise

    def print_saved(self, steps: int | None) -> None:
        """Print in a notebook how many steps are saved, if any are; the same number once."""
        if self._session.run is not None and steps not in (None, self._printed):
            self._printed = steps
            resumes = "the next paceline.join() resumes it"
            print_message(saved_sentence(self._session.run, steps, resumes))

    @contextmanager
    def explained(self, operation: str = "the next step") -> Iterator[None]:
        """Leave the block's errors as `leave` does."""
        try:
            yield
        except PacelineError as error:
            self.leave(error, operation)

    @contextmanager
    def exit_on_stop(self) -> Iterator[None]:
        """Leave the block's errors and its stop as `leave` does."""
        try:
            yield
        except (PacelineError, Stop) as error:
            self.leave(error)

    def leave(self, error: PacelineError | Stop, operation: str = "the next step") -> NoReturn:
        """Raise what an error, or a requested stop, is to the script.

        An error names options as arguments. The cause of a lost peer comes instead of its loss.

        Args:
            error: what ended a block.
            operation: what the peer is missing from.

        Raises:
            PacelineError: the error, or its cause.
            SystemExit: the run stops, as a signal requested.
            KeyboardInterrupt: likewise, in an interactive interpreter.
        """
        session = self._session
        if isinstance(error, Stop):
            self.stopped = True
            rank, _ = self._run.rank_and_size()
            if session.run and rank == 0:
                print_message(saved_sentence(session.run, self._position.position.number))
            if session.interactive_signals.enabled:
                raise KeyboardInterrupt from None
            raise SystemExit(session.signals.status or _TERMINATED) from None
        error.name_of = as_argument
        if isinstance(error, CommError):
            cause = session.ended_peer(self._position.position.number, operation)
            if cause is not None:
                raise cause from error
        raise error

    def _close_or_report(self) -> None:
        """Close at the end of the script, and report where that fails."""
        if self._session.exit_handler.failed:
            return
        try:
            self._session.exit_handler.post_exit_status()
            self._close()
        except Exception as error:
            self._session.exit_handler.at_exit(error)
