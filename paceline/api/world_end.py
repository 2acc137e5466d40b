"""The end of a world: closed by its script or at the exit, stopped by a signal, or after an error.

with paceline.join(…) as world:     at the block's end
world.close()                       where the script calls it
(neither)                           when the interpreter exits, or where a notebook joins again
SIGTERM, Ctrl-C, another rank's     `SystemExit` at the next step boundary; the state is saved
an error                            the script ends; the exit handler reports it
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Protocol

from paceline.api.argument_names import as_argument
from paceline.api.open_world import set_open_world
from paceline.api.script_models import ScriptModels
from paceline.api.script_process import ScriptProcess
from paceline.cluster.print_message import print_message
from paceline.cluster.supervision.supervisor import saved_sentence
from paceline.errors import CommError, ConfigError, PacelineError, many
from paceline.run.steps import Stop
from paceline.session.session import Session
from paceline.state.checkpoint_files import Checkpoints


class Closable(Protocol):
    """Protocol of a world that can be closed."""

    def close(self) -> None:
        """End the world after its last step."""


class WorldEnd:
    """The end of a world, and the reason for it that the script and its peers get.

    Args:
        process: reports this process's end.
        session: the session, whose resources end with the world.
        models: the script's models.

    Attributes:
        closed: whether the world has ended.
        stopped: whether a request to stop has ended the script's loop; the state is saved.
        interactive: whether the interpreter is interactive, and outlives the world.
    """

    def __init__(self, process: ScriptProcess, session: Session, models: ScriptModels) -> None:
        self._process = process
        self._session = session
        self._models = models
        self._world: Closable | None = None
        self._printed: int | None = None
        self.closed = False
        self.stopped = False
        self.interactive = process.interactive_signals.enabled

    def begin(self, world: Closable) -> None:
        """Close a world at the end of the script, or save its state, unless it is closed before."""
        self._world = world
        self._process.exit_handler.world = self
        if self.folder is not None and threading.current_thread() is threading.main_thread():
            interactive = self._process.interactive_signals
            signals = interactive if interactive.enabled else self._session.signals
            self._session.resources.enter_context(signals.received(self.rescue))
        atexit.register(self._close_or_report)
        set_open_world(self)

    @property
    def folder(self) -> Path | None:
        """The run's folder."""
        return self._session.folder

    @property
    def in_step(self) -> bool:
        """Whether a step is active."""
        return self._models.in_step

    def close(self) -> None:
        """Close the world, as `World.close`."""
        assert self._world is not None
        self._world.close()

    def close_for_next(self) -> None:
        """Close the world, because the cell that joins runs again; print what is saved.

        Raises:
            CommError, CheckpointError: as `World.close`.
        """
        try:
            self.close()
        finally:
            self._models.discard_batches()
        saved = ""
        if self.folder is not None and self._session.run.leads:
            steps = Checkpoints(self.folder, self._session.output.keep_checkpoints).newest_step()
            if steps is not None:
                saved = f"; its state after {many(steps, 'step')} is saved in {self.folder}"
        print_message(f"the world that was still open is closed{saved}.")

    def rescue(self, error: BaseException | None = None) -> str:
        """Save the newest state in memory, from any thread; return a sentence for the user.

        Args:
            error: why the script ends; None: a signal.
        """
        if error is not None and not self._models.begun:  # nothing new to save, or to resume
            if self._process.folder is not None and isinstance(error, ConfigError):
                self._process.folder.discard()
            return ""
        return self._session.rescue(error)

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
            with self._process.interactive_signals.postponed():
                yield
        except KeyboardInterrupt:
            self.print_saved(save())
            raise

    def print_saved(self, steps: int | None) -> None:
        """Print in a notebook how many steps are saved, if any are; the same number once."""
        if self.folder is not None and steps not in (None, self._printed):
            self._printed = steps
            resumes = "the next paceline.join() resumes it"
            print_message(saved_sentence(self.folder, steps, resumes))

    @contextmanager
    def explained(self, operation: str) -> Iterator[None]:
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
            session.print_stopped()
            if self.interactive:
                raise KeyboardInterrupt from None
            raise SystemExit(session.exit_status) from None
        error.name_of = as_argument
        if isinstance(error, CommError):
            cause = self._process.ended_peer(session.position.number, operation)
            if cause is not None:
                raise cause from error
        raise error

    def _close_or_report(self) -> None:
        """Close at the end of the script, and report where that fails."""
        exit_handler = self._process.exit_handler
        if exit_handler.failed:
            return
        try:
            exit_handler.post_exit_status()
            self.close()
        except Exception as error:
            exit_handler.at_exit(error)
