"""A machine's supervisor: it starts the workers, watches them, and ends them all together.

    open the run -> start the workers -> wait for the first of: all ended well | one failed |
    a signal | another machine's failure -> post the reason -> end the workers -> leave

Of several failures the person is told the cause, once: a lost peer is a consequence, so its
cause is waited for, for two seconds, from this machine's other workers and from the store. The
first reason in the store is the run's, and every machine prints it.

Ending takes 5 seconds at most: SIGTERM, 4 seconds later SIGKILL, and little is waited for after
that. A second signal shortens the wait, but not below what saving takes.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from paceline.cluster.rendezvous.finished import Finished
from paceline.cluster.rendezvous.machine_rendezvous import open_run
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.store_spec import STORE_ERRORS
from paceline.cluster.stores.waiting import within
from paceline.cluster.supervision.event_queue import (
    EventQueue,
    Exited,
    Interrupted,
    Noticed,
    Signalled,
    Warned,
)
from paceline.cluster.supervision.failure_report import FailureReport, cause
from paceline.cluster.supervision.formed_run import FormedRun
from paceline.cluster.supervision.worker_process import WorkerProcess
from paceline.errors import ConfigError, PacelineError

_CAUSE_S = 2.0
_TERM_S = 4.0
_SAVE_S = 2.5  # which workers have to save what they trained, whoever is in a hurry
_KILL_S = 0.5
_POST_S = 1.0
_LEAVE_S = 1.0


def say(text: str) -> None:
    """Print a line for the person, on standard error; without one, nobody reads it."""
    with suppress(OSError):
        erase = "\r\x1b[2K" if sys.stderr.isatty() else ""  # of a worker's progress, or of ^C
        print(f"{erase}paceline: {text}", file=sys.stderr, flush=True)


def finished_sentence(run_id: str) -> str:
    """Say that there is nothing to do."""
    return f"run {run_id} is finished; give another --run_id to train again."


def saved_sentence(run: Path) -> str:
    """Say where a run that was stopped goes on."""
    return f"the state is saved in {run}, and the same command goes on."


def supervise(
    plan: RunPlan,
    argv: Sequence[str],
    *,
    tell: Callable[[str], None] = say,
    formed: Callable[[], None] = lambda: None,
    finish: Callable[[], None] | None = None,
) -> int:
    """Run this machine's workers to their end; errors are told, not raised. Main thread only.

    Args:
        plan: this machine's part of the run.
        argv: the command of a worker; its place is in its environment.
        tell: receives lines for the person.
        formed: called once all machines are there, before a worker starts; a `PacelineError` of
            it ends the run on all machines.
        finish: writes down that the run is finished; called once that is certain. None: nobody
            needs to know.

    Returns:
        the exit status: 0, that of the run's failure, 130 for SIGINT, 143 for SIGTERM.
    """
    with (
        closing(EventQueue()) as events,
        events.signals(),
        tempfile.TemporaryDirectory(prefix="paceline-") as folder,
    ):
        try:
            run = open_run(
                plan,
                tell=tell,
                notice=lambda failure: events.put(Noticed(failure=failure)),
                warn=lambda text: events.put(Warned(text=text)),
                pause=events.pause,
            )
        except Interrupted as end:
            failure = _reason(end.event, f"machine {plan.machine}")
        except PacelineError as error:
            failure = FailureReport.of(error)
        except Finished:
            failure = _finish_late(plan, finish)
        else:
            return _Crew(plan, run, events, tell).work(argv, Path(folder), formed, finish)
        tell(failure.text)
        return failure.status


class _Crew:
    """The workers of one machine, from their start to their end."""

    def __init__(
        self, plan: RunPlan, run: FormedRun, events: EventQueue, tell: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._run = run
        self._events = events
        self._tell = tell
        self._workers: dict[
            int, WorkerProcess
        ] = {}  # those that haven't ended, as far as events say

    def work(
        self,
        argv: Sequence[str],
        folder: Path,
        formed: Callable[[], None],
        finish: Callable[[], None] | None,
    ) -> int:
        try:
            failure = (
                self._prepare(formed)
                or self._start(argv, folder)
                or self._first_failure()
                or (self._finish(finish) if finish else None)
            )
            if failure is not None:
                failure = self._post(failure)  # before the others see workers end because of it
                self._signal(signal.SIGTERM)
                self._tell(failure.text)
            self._end()
        finally:
            self._signal(signal.SIGKILL)
        self._leave(failure)
        return 0 if failure is None else failure.status

    def _prepare(self, formed: Callable[[], None]) -> FailureReport | None:
        try:
            formed()
        except PacelineError as error:
            return self._failed(error)
        return None

    def _finish(self, finish: Callable[[], None]) -> FailureReport | None:
        try:
            self._run.finish(finish, self._events.pause, self._plan.timeout)
        except Interrupted as end:
            return _reason(end.event, self._machine())
        except PacelineError as error:
            return self._failed(error)
        return None

    def _failed(self, error: PacelineError) -> FailureReport:
        failure = FailureReport.of(error)
        return failure if self._plan.machines == 1 else failure.by(self._machine())

    def _start(self, argv: Sequence[str], folder: Path) -> FailureReport | None:
        if self._plan.machines > 1:
            first = self._run.generation_info.hosts[0]
            self._tell(f"all {self._plan.machines} machines have met; rank 0 is on {first}.")
        for local_rank in range(self._plan.workers):
            place = self._run.worker(local_rank, folder / f"error.{local_rank}.json")
            try:
                self._workers[local_rank] = WorkerProcess(argv, place, self._putter(local_rank))
            except OSError as error:
                sentence = f"{argv[0]} can't be started: {error.strerror}; see if it is installed."
                return FailureReport.of(ConfigError(sentence)).by(self._name(local_rank))
        return None

    def _putter(self, local_rank: int) -> Callable[[int], None]:
        return lambda code: self._events.put(Exited(local_rank=local_rank, returncode=code))

    def _first_failure(self) -> FailureReport | None:
        """Wait until all workers have ended well (None), or for the reason that they won't."""
        failures: list[FailureReport] = []
        deadline: float | None = None
        while self._workers or failures:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            failure = self._next(left)
            if failure is None:
                continue
            failures.append(failure)
            if not failure.consequence:
                break
            deadline = deadline or time.monotonic() + _CAUSE_S
        return cause([*failures, *self._words()] if failures else [])

    def _words(self) -> Iterator[FailureReport]:
        """Yield what workers that haven't ended yet have left on why they fail."""
        for local_rank, worker in self._workers.items():
            word = worker.word(self._name(local_rank))
            if word is not None:
                yield word

    def _next(self, timeout: float | None) -> FailureReport | None:
        """Take the next event; return the failure in it, if it is one."""
        event = self._events.get(timeout)
        if isinstance(event, Warned):
            self._tell(event.text)
        elif isinstance(event, Exited):
            worker = self._workers.pop(event.local_rank)
            if event.returncode != 0:
                return worker.failure(self._name(event.local_rank), event.returncode)
        elif event is not None:
            return _reason(event, self._machine())
        return None

    def _post(self, failure: FailureReport) -> FailureReport:
        """Return the run's reason: this one, or the one that another machine gave before."""
        return within(_POST_S, lambda: self._run.post(failure)) or failure

    def _end(self) -> None:
        """Wait for the workers, which were told to end; kill them after the limit or a signal."""
        if not self._endedwithin(_TERM_S, hurry=True):
            self._signal(signal.SIGKILL)
            if not self._endedwithin(_KILL_S, hurry=False):
                self._tell("some workers can't be killed: they hang in the kernel.")

    def _endedwithin(self, limit: float, *, hurry: bool) -> bool:
        started = time.monotonic()
        deadline = started + limit
        while self._workers:
            left = deadline - time.monotonic()
            event = self._events.get(left) if left > 0 else None
            if isinstance(event, Exited):
                del self._workers[event.local_rank]
            if hurry and isinstance(event, Signalled):
                deadline = min(deadline, started + _SAVE_S)
            if left <= 0:
                return False
        return True

    def _leave(self, failure: FailureReport | None) -> None:
        if failure is not None:
            within(_LEAVE_S, lambda: self._run.leave(time.sleep, _LEAVE_S))
            return
        with suppress(Interrupted):  # the person doesn't want to wait for the other machines
            try:
                self._run.leave(self._events.pause, self._plan.timeout)
            except STORE_ERRORS as error:
                self._tell(f"the meeting place couldn't be cleaned up: {error}")

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            worker.send(number)

    def _name(self, local_rank: int) -> str:
        members = self._run.members(local_rank)
        return members.describe(members.rank)

    def _machine(self) -> str:
        return (
            f"machine {self._plan.machine} ({self._run.generation_info.hosts[self._plan.machine]})"
        )


def _finish_late(plan: RunPlan, finish: Callable[[], None] | None) -> FailureReport:
    """Return what there is to say of a run that was finished before; its status is 0."""
    try:
        if finish is not None:
            finish()
    except PacelineError as error:
        return FailureReport.of(error)
    return FailureReport(text=finished_sentence(plan.run_id), status=0)


def _reason(event: Signalled | Noticed, machine: str) -> FailureReport:
    if isinstance(event, Noticed):
        return event.failure
    text = f"stopped by {event.number.name} on {machine}."
    return FailureReport(text=text, status=128 + event.number)
