"""`paceline serve`: a server of a run: owns parameters, or merges weights.

    a user starts it          it finds the run by its id, in the store of the rendezvous
    `paceline train` does     its environment names the store; it outlives its supervisor

Checkpoints are the workers', and so are snapshots, which have the state of the optimizer. When a
parameter server ends early (`--sync server`), the workers continue without it. When an averaging
server does (`--average_through server`), they save their state and end.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from types import FrameType

from paceline.cli.flags import parse
from paceline.cluster.environment import WorkerEnvironment, read_environment
from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.print_message import print_message
from paceline.cluster.rendezvous.deadline import Deadline, PrintedWaits
from paceline.cluster.rendezvous.reachability import ProbeListener, own_addresses
from paceline.cluster.rendezvous.registered_machine import STORE_LIMIT
from paceline.cluster.rendezvous.registration import Registration
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.rendezvous.server_registration import (
    Invitation,
    RegisteredServer,
    await_invitation,
    meet_run,
    open_start,
)
from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.stores.store_spec import open_store
from paceline.cluster.supervision.worker import (
    declare_survivable,
    end_process,
    end_with_supervisor,
    report_error,
)
from paceline.config.serve import ServeConfig
from paceline.errors import CommError, Message
from paceline.server.serve import serve_generations

DESCRIPTION = """\
Serve a run: update its parameters (--sync server), or merge its weights.

Merging is --average_through server. A server trains nothing, and needs no data.

It learns the model and the optimizer from the run, and ends when the run ends.

When a parameter server ends early, the workers continue without it.

When an averaging server does, they save their state, and the run ends too.

`paceline train` starts the servers itself, without --parameter_servers apart.

examples:
  a run of two workers and its parameter server on another machine:
    paceline serve --run_id third --master 10.0.0.5:29500
    paceline train --train_data train-lmdb --num_workers 2 --sync server
        --parameter_servers apart --run_id third --master 10.0.0.5:29500
  two machines and their averaging server on a third, which share a folder:
    paceline serve --run_id first --file_store_path /shared/meet
    paceline train --train_data train-lmdb --sync average
        --average_through server --average_server apart --num_shards 2
        --shard_id 0 --run_id first --file_store_path /shared/meet
  a script: its rank 0 prints the command that it waits for, such as
    paceline serve --run_id torchrun-job7.0 --master 10.0.0.5:29500
"""


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments after its name; return its exit status.

    Raises:
        PacelineError: a mistake of the caller, or no run came.
    """
    config = parse(ServeConfig, argv, prog="paceline serve", description=DESCRIPTION)
    worker = read_environment().worker
    if worker is not None and not worker.runs_command:
        return _serve_supervised(worker)
    config.require_run()
    return _serve_run(config)


def _serve_run(config: ServeConfig) -> int:
    """Serve the run that the flags name."""
    plan = RunPlan.of(config.world, workers=1)
    assert plan.rendezvous is not None
    remedy = Message(
        "start it with {--run_id} {}, {--sync} server, or {--sync} average and {--average_through} "
        "server, and the same rendezvous, or give a longer {--first_iter_timeout}",
        plan.run_id,
    )
    deadline = Deadline(plan.first_iter_timeout, remedy, waits=PrintedWaits())
    with _ended_by_sigterm(), closing(ProbeListener()) as listener:
        own = Registration(
            process=ProcessIdentity.of_this_process(),
            addresses=own_addresses(plan.interfaces, other_machines=True),
            port=listener.port,
        )
        registered, invitation = meet_run(plan.rendezvous, own, plan.run_id, deadline)
        with closing(registered):
            print_message(f"joined run {plan.run_id!r}.")
            status = _answer(registered, invitation, config, print_message)
    return status


def _answer(
    registered: RegisteredServer,
    invitation: Invitation,
    config: ServeConfig,
    report: Callable[[str], None],
) -> int:
    """Answer an invitation, and serve until the workers have ended."""
    limit = config.first_iter_timeout
    try:
        serve_generations(registered, invitation, model=config.model, limit=limit, report=report)
    except CommError as error:
        print_message(FailureReport.of(error).text)
        return error.status
    report("the run's workers have ended.")
    return 0


def _serve_supervised(environment: WorkerEnvironment) -> int:
    """Serve the run whose supervisor started this process.

    A signal is for the workers, which may still merge before they end; so it ends this process only
    as long as it doesn't serve. Where the supervisor is killed, it serves those that continue.
    """
    end_with_supervisor()
    serving = False
    signalled = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal signalled
        signalled = number
        if not serving:
            end_process(128 + number)

    def set_serving(value: bool) -> None:
        nonlocal serving
        serving = value
        declare_survivable()  # as its workers do
        if signalled and not serving:
            end_process(128 + signalled)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        store = open_start(open_store(environment.store, STORE_LIMIT))
        own = Registration(
            process=ProcessIdentity.of_this_process(),
            addresses=own_addresses((), other_machines=False),
            port=0,
        )
        limit = environment.first_iter_timeout
        deadline = Deadline(limit, "check the output of the workers")
        with closing(RegisteredServer(store, own)) as registered:
            registered.register(environment.run_id, deadline)
            invitation = await_invitation(registered, environment.run_id, deadline)
            assert invitation is not None
            serve_generations(
                registered, invitation, limit=limit, report=_report_nothing, set_serving=set_serving
            )
    except BaseException as error:
        end_process(report_error(environment, error))
    return 0


def _report_nothing(line: str) -> None:
    """Leave it to the supervisor to report what ends the run."""


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, with status 143."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
