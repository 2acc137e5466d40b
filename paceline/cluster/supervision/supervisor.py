"""A machine's supervisor: it starts the workers, watches them, and ends them all together.

    open the run -> start the workers -> wait for their end, or for the run's -> deregister

`machine_workers` is the second half, from the workers' start on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from paceline.cluster.membership.generation_waits import OutsideWorld
from paceline.cluster.print_message import print_message
from paceline.cluster.rendezvous.formed_run import FormedRun, MarkFinished
from paceline.cluster.rendezvous.machine_rendezvous import open_run
from paceline.cluster.rendezvous.registered_machine import Finished
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.supervision.event_queue import EventQueue, Interrupted
from paceline.cluster.supervision.machine_workers import (
    MachineWorkers,
    OpenEndpoint,
    reason_of,
)
from paceline.cluster.supervision.server_command import ServerCommand
from paceline.errors import Diverged, PacelineError, many

RESUMES = "the same command resumes it"
"""What resumes a run, a clause."""


def finished_sentence(run_id: str, edited: Sequence[str] = (), reason: str = "") -> str:
    """Return the line that there is nothing to do.

    Args:
        run_id: of the run.
        reason: why it ended before its last epoch, a clause that names the flag; "": it didn't.
        edited: hyperparameters that this start would change: "--momentum 0.5 instead of 0.9".
    """
    unused = f" Nothing is trained with {' and '.join(edited)}." if edited else ""
    if reason:
        return (
            f"run {run_id} is finished: {reason}; raise that flag, or leave it out, to continue "
            f"the run, or give another --run_id to train again.{unused}"
        )
    return (
        f"run {run_id} is finished; give another --run_id to train again, or more "
        f"--num_epochs.{unused}"
    )


def saved_sentence(run: Path, steps: int | None = None, resumes: str = RESUMES) -> str:
    """Return the line that names the folder from which a run resumes.

    Args:
        run: the run's folder.
        steps: the number of completed steps in its newest checkpoint; None: of all steps.
        resumes: what resumes the run, or that it continues elsewhere: a clause.
    """
    after = "" if steps is None else f" after {many(steps, 'step')}"
    return f"the state{after} is saved in {run}, and {resumes}."


def save_after(
    error: BaseException | None, run: Path, save: Callable[[bool], int | None], *, first_here: bool
) -> str:
    """Save the newest state in memory, as is right after an error; return a sentence for the user.

    Args:
        error: why the process ends; None: a signal.
        run: the run's folder.
        save: saves, given whether a process that isn't rank 0 may write, as on the losing side of a
            cut link; returns the number of completed steps, None where nothing is saved.
        first_here: this process is the first one of its machine.

    Returns:
        the sentence; "" where nothing is saved, as by a process that the others have expelled.
    """
    outside = error if isinstance(error, OutsideWorld) else getattr(error, "__cause__", None)
    leaderless = False
    resumes = RESUMES
    if isinstance(error, Diverged):
        resumes = "the same command would diverge again from there"
    if isinstance(outside, OutsideWorld):
        # The others continue, perhaps in the same folder: this state is of the past.
        if outside.expelled:
            return ""
        leaderless = first_here
        if outside.others_continue:
            resumes = "the run continues on other machines"
    steps = save(leaderless)
    return saved_sentence(run, steps, resumes) if steps else ""


def supervise(
    plan: RunPlan,
    argv: Sequence[str],
    *,
    formed: Callable[[FormedRun], None] = lambda run: None,
    finish: MarkFinished | None = None,
    servers: ServerCommand | None = None,
    open_endpoint: OpenEndpoint | None = None,
) -> int:
    """Run this machine's workers to their end; errors are reported, not raised. Main thread only.

    Args:
        plan: this machine's part of the run.
        argv: the command of a worker; its rank is in its environment.
        formed: called with the run once all machines are there, before a worker starts; a
            `PacelineError` of it ends the run on all machines.
        finish: writes down that the run is finished; called once that is certain. None: no mark
            is needed.
        servers: the servers beside the workers; None: there are none.
        open_endpoint: opens the supervisor's end of the connections to the members, before a worker
            starts; None: no worker survives the loss of another.

    Returns:
        the exit status: 0, that of the run's failure, 130 for SIGINT, 143 for SIGTERM.
    """
    with closing(EventQueue()) as events, events.signals():
        failure = run_workers(
            plan,
            argv,
            events,
            formed=formed,
            finish=finish,
            servers=servers,
            open_endpoint=open_endpoint,
        )
    return 0 if failure is None else failure.status


def run_workers(
    plan: RunPlan,
    argv: Sequence[str],
    events: EventQueue,
    *,
    prints_failure: bool = True,
    formed: Callable[[FormedRun], None] = lambda run: None,
    finish: MarkFinished | None = None,
    servers: ServerCommand | None = None,
    open_endpoint: OpenEndpoint | None = None,
) -> FailureReport | None:
    """Run this machine's workers to their end; return why they didn't end well, or None.

    Args:
        plan: this machine's part of the run.
        argv: the command of a worker.
        events: receives signals, which end the run.
        prints_failure: whether the failure is printed, once the workers have ended or take long to.
        formed: called with the run once all machines are there.
        finish: writes down that the run is finished.
        servers: the servers beside the workers; None: there are none.
        open_endpoint: opens the supervisor's end of the connections to the members.
    """
    try:
        run = open_run(plan, events)
    except Interrupted as end:
        failure = reason_of(end.event, f"machine {plan.machine}")
    except PacelineError as error:
        failure = FailureReport.of(error)
    except Finished:
        failure = _finish_late(plan, finish)
    else:
        workers = MachineWorkers(
            plan, run, events, open_endpoint, servers=servers, prints_failure=prints_failure
        )
        return workers.work(argv, formed, finish)
    if prints_failure:
        print_message(failure.text)
    return failure


def _finish_late(plan: RunPlan, finish: MarkFinished | None) -> FailureReport:
    """Return the line about a run that was finished before; its status is 0."""
    try:
        if finish is not None:
            finish(True)
    except PacelineError as error:
        return FailureReport.of(error)
    return FailureReport(text=finished_sentence(plan.run_id), status=0)
