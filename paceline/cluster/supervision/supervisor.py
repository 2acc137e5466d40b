"""A machine's supervisor: it starts the workers, watches them, and ends them all together.

    open the run -> start the workers -> wait for the first of: all ended well | one failed |
    a signal | another machine's failure -> post the reason -> end the workers -> deregister

Of several failures the supervisor reports the cause, once: a lost peer is a consequence, so the
supervisor waits two seconds for its cause, from this machine's other workers and from the store.
The first report in the store is the run's, and every machine prints it.

Workers get SIGTERM, and SIGKILL 4 seconds later. A second signal shortens the wait, but not below
what saving takes. Nothing is on the disk: a worker's error file is memory of this process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

from paceline.cluster.rendezvous.machine_rendezvous import open_run
from paceline.cluster.rendezvous.registered_machine import Finished
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.store_spec import STORE_ERRORS
from paceline.cluster.stores.waiting import call_with_timeout
from paceline.cluster.supervision.event_queue import (
    EventQueue,
    Exited,
    Interrupted,
)
from paceline.cluster.supervision.failure_report import FailureReport, cause, post
from paceline.cluster.supervision.formed_run import FormedRun
from paceline.cluster.supervision.worker_process import WorkerProcess
from paceline.errors import ConfigError, Message, PacelineError, many

_CAUSE_S = 2.0
_TERM_S = 4.0
_SAVE_S = 2.5  # a worker has that long to save what it trained, whatever comes
_KILL_S = 0.5
_REAP_S = 10.0  # a busy machine may take that long to end a killed process
_POST_S = 1.0
_DEREGISTER_S = 1.0


def print_message(text: str | Message) -> None:
    """Print a line for the user, on standard error, if there is one."""
    with suppress(OSError):
        erase = "\r\x1b[2K" if sys.stderr.isatty() else ""  # of a worker's progress, or of ^C
        print(f"{erase}paceline: {text}", file=sys.stderr, flush=True)


def finished_sentence(run_id: str) -> str:
    """Return the line that there is nothing to do."""
    return f"run {run_id} is finished; give another --run_id to train again."


def saved_sentence(
    run: Path, steps: int | None = None, resumes: str = "the same command resumes it"
) -> str:
    """Return the line that names the folder from which a run resumes.

    Args:
        run: the run's folder.
        steps: the number of completed steps in its newest checkpoint; None: of all steps.
        resumes: what resumes the run, a clause.
    """
    after = "" if steps is None else f" after {many(steps, 'step')}"
    return f"the state{after} is saved in {run}, and {resumes}."


def supervise(
    plan: RunPlan,
    argv: Sequence[str],
    *,
    report: Callable[[str], None] = print_message,
    formed: Callable[[], None] = lambda: None,
    finish: Callable[[], None] | None = None,
    server: Sequence[str] = (),
) -> int:
    """Run this machine's workers to their end; errors are reported, not raised. Main thread only.

    Args:
        plan: this machine's part of the run.
        argv: the command of a worker; its rank is in its environment.
        report: receives lines for the user.
        formed: called once all machines are there, before a worker starts; a `PacelineError` of
            it ends the run on all machines.
        finish: writes down that the run is finished; called once that is certain. None: no mark
            is needed.
        server: the command of a server of merges that runs beside the workers; none: there is none.

    Returns:
        the exit status: 0, that of the run's failure, 130 for SIGINT, 143 for SIGTERM.
    """
    with closing(EventQueue()) as events, events.signals():
        failure = run_workers(
            plan,
            argv,
            events,
            report=report,
            report_failure=lambda failure: report(failure.text),
            formed=formed,
            finish=finish,
            server=server,
        )
    return 0 if failure is None else failure.status


def run_workers(
    plan: RunPlan,
    argv: Sequence[str],
    events: EventQueue,
    *,
    report: Callable[[str], None] = print_message,
    report_failure: Callable[[FailureReport], None] = lambda failure: None,
    formed: Callable[[], None] = lambda: None,
    finish: Callable[[], None] | None = None,
    server: Sequence[str] = (),
) -> FailureReport | None:
    """Run this machine's workers to their end; return why they didn't end well, or None.

    Args:
        plan: this machine's part of the run.
        argv: the command of a worker.
        events: receives signals, which end the run.
        report: receives lines for the user.
        report_failure: called with the failure, before the workers are ended.
        formed: called once all machines are there.
        finish: writes down that the run is finished.
        server: the command of a server of merges; none: there is none.
    """
    try:
        run = open_run(
            plan,
            report=report,
            on_failure=events.put,
            report_store_loss=events.put,
            pause=events.pause,
        )
    except Interrupted as end:
        failure = _reason(end.event, f"machine {plan.machine}")
    except PacelineError as error:
        failure = FailureReport.of(error)
    except Finished:
        failure = _finish_late(plan, finish)
    else:
        commands = [argv] * plan.workers + [server] * bool(server)
        return _Workers(plan, run, events, report, report_failure).work(commands, formed, finish)
    report_failure(failure)
    return failure


class _Workers:
    """Worker processes of one machine, from their start to their end; a server may be beside them.

    The server's local rank follows the workers'.
    """

    def __init__(
        self,
        plan: RunPlan,
        run: FormedRun,
        events: EventQueue,
        report: Callable[[str], None],
        report_failure: Callable[[FailureReport], None],
    ) -> None:
        self._plan, self._run = plan, run
        self._events, self._report, self._report_failure = events, report, report_failure
        self._workers: dict[int, WorkerProcess] = {}
        """By local rank, those whose end is no event yet."""

        self._error_files = ExitStack()

    def work(
        self,
        commands: Sequence[Sequence[str]],
        formed: Callable[[], None],
        finish: Callable[[], None] | None,
    ) -> FailureReport | None:
        try:
            failure = self._work(commands, formed, finish)
            if failure is not None:
                # The run's reason, this one or another machine's, before the others see workers
                # end because of it.
                first = call_with_timeout(
                    _POST_S, partial(post, self._run.registered.store, failure)
                )
                failure = first or failure
                self._signal(signal.SIGTERM)
                self._report_failure(failure)
            self._end()
        finally:
            self._signal(signal.SIGKILL)
            self._error_files.close()
        self._deregister(failure)
        return failure

    def _work(
        self,
        commands: Sequence[Sequence[str]],
        formed: Callable[[], None],
        finish: Callable[[], None] | None,
    ) -> FailureReport | None:
        """Do all that ends well (None) or with a reason for the run's end."""
        try:
            formed()
            failure = self._start(commands) or self._first_failure()
            if failure is None and finish is not None:
                self._run.finish(finish, self._events.pause, self._plan.timeout)
        except Interrupted as end:
            failure = _reason(end.event, self._machine())
        except PacelineError as error:
            failure = FailureReport.of(error)
            if self._plan.machines > 1:
                failure = failure.by(self._machine())
        return failure

    def _start(self, commands: Sequence[Sequence[str]]) -> FailureReport | None:
        if self._plan.machines > 1:
            first = self._run.generation.leader.host
            self._report(f"all {self._plan.machines} machines have joined; rank 0 is on {first}.")
        for local_rank, argv in enumerate(commands):
            memory = os.memfd_create(f"paceline error file {local_rank}")
            self._error_files.callback(os.close, memory)
            worker = self._run.worker_environment(local_rank, f"/proc/{os.getpid()}/fd/{memory}")
            try:
                self._workers[local_rank] = WorkerProcess(argv, worker, self._events)
            except OSError as error:
                sentence = (
                    f"{argv[0]} can't be started: {error.strerror}; check that it is installed."
                )
                return FailureReport.of(ConfigError(sentence)).by(self._name(local_rank))
        return None

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
        # Workers that fail and haven't ended yet may have left a report, too.
        reports = (worker.report(self._name(rank)) for rank, worker in self._workers.items())
        return cause([*failures, *filter(None, reports)])

    def _next(self, timeout: float | None) -> FailureReport | None:
        """Take the next event; return the failure in it, if it is one."""
        event = self._events.get(timeout)
        if isinstance(event, str):
            self._report(event)
        elif isinstance(event, Exited):
            worker = self._workers.pop(event.local_rank)
            if event.returncode != 0:
                name = self._name(event.local_rank)  # its report, or what its exit status says
                return worker.report(name) or FailureReport.of_exit(name, event.returncode)
        elif event is not None:
            return _reason(event, self._machine())
        return None

    def _end(self) -> None:
        """Wait for the workers, which have SIGTERM; kill them after the limit or a signal."""
        if self._ended_within(_TERM_S, hurry=True):
            return
        self._signal(signal.SIGKILL)
        deadline = time.monotonic() + _REAP_S
        while not self._ended_within(_KILL_S, hurry=False):
            hung = [self._name(rank) for rank, worker in self._workers.items() if worker.hangs()]
            if hung:
                self._report(f"{', '.join(hung)} can't be killed: a system call hangs.")
                return
            if time.monotonic() > deadline:
                names = ", ".join(map(self._name, self._workers))
                self._report(f"{names} did not end within {_REAP_S:g} s after SIGKILL.")
                return

    def _ended_within(self, limit: float, *, hurry: bool) -> bool:
        started = time.monotonic()
        deadline = started + limit
        while self._workers:
            left = deadline - time.monotonic()
            event = self._events.get(left) if left > 0 else None
            if isinstance(event, Exited):
                del self._workers[event.local_rank]
            if hurry and isinstance(event, signal.Signals):
                deadline = min(deadline, started + _SAVE_S)
            if left <= 0:
                return False
        return True

    def _deregister(self, failure: FailureReport | None) -> None:
        if failure is not None:
            call_with_timeout(
                _DEREGISTER_S, lambda: self._run.deregister(time.sleep, _DEREGISTER_S)
            )
            return
        with suppress(Interrupted):  # a signal: the other machines are not waited for
            try:
                self._run.deregister(self._events.pause, self._plan.timeout)
            except STORE_ERRORS as error:
                self._report(f"the rendezvous couldn't be cleaned up: {error}")

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            worker.send(number)

    def _name(self, local_rank: int) -> str:
        if local_rank == self._plan.workers:
            return f"the averaging server on {self._machine()}"
        generation = self._run.generation
        return generation.describe(generation.rank_of(self._plan.machine, local_rank))

    def _machine(self) -> str:
        generation, machine = self._run.generation, self._plan.machine
        host = generation.members[generation.rank_of(machine, 0)].host
        return f"machine {machine} ({host})"


def _finish_late(plan: RunPlan, finish: Callable[[], None] | None) -> FailureReport:
    """Return the line about a run that was finished before; its status is 0."""
    try:
        if finish is not None:
            finish()
    except PacelineError as error:
        return FailureReport.of(error)
    return FailureReport(text=finished_sentence(plan.run_id), status=0)


def _reason(event: signal.Signals | FailureReport, machine: str) -> FailureReport:
    if isinstance(event, FailureReport):
        return event
    return FailureReport(text=f"stopped by {event.name} on {machine}.", status=128 + event)
