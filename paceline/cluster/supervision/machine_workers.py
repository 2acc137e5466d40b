"""The workers of one machine, in their supervisor: from their start to their end.

    start the workers -> wait for the first of: all ended | one failed | a signal | another
    machine's failure -> announce the end, post the reason -> end the workers -> deregister

Of several failures the supervisor reports the cause, once: a lost peer is a consequence, so the
supervisor waits two seconds for its cause, from this machine's other workers and from the store.
The first report in the store is the run's, and every machine prints it.

A worker with a survival mark may be lost: killed, or ended because it lost its peers. The others
continue, the supervisor's endpoint reports the loss to them, and the run ends well if one of them
does. An error of a worker's own ends the run, because another worker would meet it too. The workers
don't continue without an averaging server: they save their state, and end by themselves. Without a
parameter server they continue. Servers end with the run, or when no worker is left here. A worker
that the others have expelled, and that doesn't end by itself, as a frozen one, is killed some
seconds after the world has ended without it.

Workers get SIGTERM, and SIGKILL 4 seconds later. A second signal shortens the wait, but not below
what saving takes. Nothing is on the disk: a worker's error file is memory of this process.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial

from paceline.cluster.membership.generation import Member, joins_key
from paceline.cluster.print_message import print_message
from paceline.cluster.rendezvous.formed_run import FormedRun, MarkFinished
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.rendezvous.server_registration import announce_servers
from paceline.cluster.stores.failure_report import FailureReport, cause, post
from paceline.cluster.stores.store_spec import STORE_ERRORS
from paceline.cluster.stores.waiting import call_with_timeout
from paceline.cluster.supervision.event_queue import EventQueue, Exited, Interrupted
from paceline.cluster.supervision.machine_endpoint import MachineEndpoint, WorkerExit
from paceline.cluster.supervision.server_command import ServerCommand
from paceline.cluster.supervision.supervisor_file import SupervisorFile
from paceline.cluster.supervision.worker_process import WorkerProcess
from paceline.errors import ConfigError, PacelineError

_CAUSE_S = 2.0
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_KILLED = {-number for number in signal.Signals if number != signal.SIGTERM}
# Ctrl-C ends a run within five seconds: the last one is for what SIGKILL takes.
_TERM_S = 4.0
_REPORT_S = 2.0  # of those, at most, before the run's reason is reported
_SAVE_S = 2.5  # a worker has that long to save what it trained, whatever comes
_KILL_S = 0.5
_REAP_S = 10.0  # a busy machine may take that long to end a killed process
_POST_S = 1.0
_DEREGISTER_S = 1.0
_LOOK_S = 1.0  # between two looks whether the world has ended without a worker
_EXPELLED_S = 5.0  # that an expelled worker has to end by itself, once the world has ended
_VOTE_S = 5.0  # within which the members of other machines continue without this one

OpenEndpoint = Callable[[FormedRun, EventQueue], MachineEndpoint]
"""Opens the supervisor's end of the connections to the members of a formed run. The events receive
the reason for which another process ends the run."""


class MachineWorkers:
    """Worker processes of one machine, from their start to their end; servers may be beside them.

    The servers' local ranks follow the workers'.
    """

    def __init__(
        self,
        plan: RunPlan,
        run: FormedRun,
        events: EventQueue,
        open_endpoint: OpenEndpoint | None = None,
        *,
        servers: ServerCommand | None = None,
        prints_failure: bool = True,
    ) -> None:
        self._plan = plan
        self._run = run
        self._events = events
        self._servers = servers
        self._prints_failure = prints_failure
        self._open_endpoint = open_endpoint
        self._endpoint: MachineEndpoint | None = None
        self._workers: dict[int, WorkerProcess] = {}
        """By local rank, those whose end is no event yet."""

        self._lost: dict[str, FailureReport] = {}
        """By their names at that time, how workers ended whose loss the others survive; and how
        servers did."""

        self._world_ended_at: float | None = None  # without all workers that are left here
        self._expelled: set[int] = set()  # the local ranks of those that were killed for it
        self._isolated = False  # all workers here are lost; other machines may continue
        self._hurried = False  # a second signal came
        self._lost_machines: frozenset[int] = frozenset()  # known at the end
        self._survivable = False  # a worker that ended well survived the loss of others
        self._resources = ExitStack()

    def work(
        self,
        argv: Sequence[str],
        formed: Callable[[FormedRun], None],
        finish: MarkFinished | None,
    ) -> FailureReport | None:
        try:
            failure = self._work(argv, formed, finish)
            if failure is not None:
                for worker in self._workers.values():
                    worker.announce_end()
                # The run's reason, this one or another machine's, before the others see workers
                # end because of it.
                if self._isolated and self._endpoint is not None:
                    self._endpoint.await_change(_VOTE_S)
                if not self._isolated:
                    if self._endpoint is not None:
                        self._endpoint.end_run(failure)
                    first = call_with_timeout(
                        _POST_S, partial(post, self._run.registered.store, failure)
                    )
                    failure = first or failure
                self._signal(signal.SIGTERM)
                ended = self._ended_within(_REPORT_S, hurry=True)
                # A user looks at the last line for the reason: workers reported what they saved.
                if self._prints_failure:
                    print_message(failure.text)
                if not ended:
                    self._end()
        finally:
            self._signal(signal.SIGKILL)
            self._lost_machines = self._machines_lost()
            self._resources.close()
        self._deregister(failure)
        return failure

    def _work(
        self,
        argv: Sequence[str],
        formed: Callable[[FormedRun], None],
        finish: MarkFinished | None,
    ) -> FailureReport | None:
        """Do all that ends well (None) or with a reason for the run's end."""
        try:
            formed(self._run)
            failure = self._start(argv) or self._first_failure() or self._apart()
            if failure is None and finish is not None:
                self._run.finish(
                    finish,
                    self._events.pause,
                    self._plan.timeout,
                    agreed=self._survivable,
                    machine_0_lost=self._endpoint is not None and self._endpoint.is_lost(0),
                )
        except Interrupted as end:
            failure = reason_of(end.event, self._machine())
        except PacelineError as error:
            failure = FailureReport.of(error)
            if self._plan.machines > 1:
                failure = failure.by(self._machine())
        return failure

    def _start(self, argv: Sequence[str]) -> FailureReport | None:
        if self._plan.machines > 1:
            first = self._run.generation.leader.host
            print_message(f"all {self._plan.machines} machines have joined; rank 0 is on {first}.")
        if self._open_endpoint is not None:
            self._endpoint = self._open_endpoint(self._run, self._events)
            self._resources.callback(self._endpoint.close)
        # The endpoint is open before the first worker looks for its address.
        commands = [argv] * self._plan.workers
        if self._servers is not None:
            announce_servers(self._run.registered.store, self._servers.count)
            commands += [self._servers.argv] * self._servers.count
        elif self._plan.requires_join and self._plan.machine == 0:  # as `paceline launch` does
            announce_servers(self._run.registered.store, 0)
        for local_rank, command in enumerate(commands):
            error_file, mark = (
                self._resources.enter_context(closing(SupervisorFile(f"{name} {local_rank}")))
                for name in ("error file", "survival mark")
            )
            worker = self._run.worker_environment(local_rank, error_file.path, mark.path)
            if self._serves(local_rank):
                worker = replace(worker, runs_command=False)
            try:
                self._workers[local_rank] = WorkerProcess(command, worker, self._events)
            except OSError as error:
                sentence = (
                    f"{command[0]} can't be started: {error.strerror}; check that it is installed."
                )
                return FailureReport.of(ConfigError(sentence)).by(self._name(local_rank))
        return None

    def _first_failure(self) -> FailureReport | None:
        """Wait until the workers have ended, well (None) or with the reason for the run's end."""
        failures: list[FailureReport] = []
        deadline: float | None = None
        while (self._workers and not self._all_lost) or failures:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            if self._endpoint is not None:
                self._end_expelled(self._endpoint)
                # A frozen worker causes no event: whether the
                # world has ended without it must be looked at.
                left = _LOOK_S if left is None else min(left, _LOOK_S)
            failure = self._next(left)
            if failure is None:
                continue
            failures.append(failure)
            if not failure.consequence:
                break
            deadline = deadline or time.monotonic() + _CAUSE_S
        if not failures and not self._all_lost:
            if self._lost:
                names = ", ".join(self._lost)
                print_message(f"the run is finished; it continued without {names}.")
            return None
        self._isolated = not failures
        # Workers that fail and haven't ended yet may have left a report, too.
        reports = (worker.report(self._name(rank)) for rank, worker in self._workers.items())
        reason = cause([*failures, *filter(None, reports), *reversed(self._lost.values())])
        if reason is None or not self._isolated:
            return reason
        rest = "No worker is left: start the same command again, and the run resumes."
        if self._plan.machines > 1:
            rest = "No worker of this machine is left."
        return replace(reason, text=f"{reason.text} {rest}")

    def _apart(self) -> FailureReport | None:
        """Say that a command, or a function, has ended well in several workers without a join.

        Returns:
            the failure that this is, where the plan calls it one.
        """
        plan = self._plan
        size = len(self._run.generation.members)
        if not plan.runs_command or size == 1:
            return None
        keys = [joins_key(plan.machine, local_rank) for local_rank in range(plan.workers)]
        store = self._run.registered.store
        joined = call_with_timeout(_POST_S, lambda: any(store.check([key]) for key in keys))
        if joined is not False:  # None: the store is lost, with the machine that served it
            return None
        what = "command" if plan.requires_join else "function"
        text = (
            f"the {what} ended without paceline.join(): its {size} processes worked apart, each as "
            "if it were the only one. Call paceline.join() before training, or start one process."
        )
        if plan.requires_join:
            return FailureReport(text=text, status=PacelineError.status)
        print_message(text)
        return None

    def _end_expelled(self, endpoint: MachineEndpoint) -> None:
        """Kill the workers that are left, some seconds after the world has ended without them."""
        left = [rank for rank in self._workers if not self._serves(rank)]
        if not left or not all(endpoint.ended_without(self._member(rank).id) for rank in left):
            self._world_ended_at = None
            return
        now = time.monotonic()
        self._world_ended_at = self._world_ended_at or now
        if now - self._world_ended_at > _EXPELLED_S:
            self._expelled |= {*left}
            for rank in left:
                self._workers[rank].send(signal.SIGKILL)

    def _next(self, timeout: float | None) -> FailureReport | None:
        """Take the next event; return the failure in it, if it is one."""
        event = self._events.get(timeout)
        if isinstance(event, str):
            print_message(event)
        elif isinstance(event, Exited):
            return self._exited(event)
        elif event is not None:
            return reason_of(event, self._machine())
        return None

    def _exited(self, event: Exited) -> FailureReport | None:
        """Note a worker's end; return the failure, if it is one that the others don't survive."""
        local_rank = event.local_rank
        worker = self._workers.pop(local_rank)
        name = self._name(local_rank)
        if all(map(self._serves, self._workers)):
            self._signal(signal.SIGTERM)  # to servers that serve no other machine's workers
            if self._serves(local_rank):
                if event.returncode in _KILLED:  # before, and a worker's failure came first
                    self._lost[name] = FailureReport.of_exit(name, event.returncode)
                return None
        if event.returncode == 0:
            self._survivable |= worker.survives
            self._report_exit(local_rank, name, f"{name} ended with status 0.", failed=False)
            return None
        own = worker.report(name)  # else what its exit status says
        failure = own or FailureReport.of_exit(name, event.returncode)
        if local_rank in self._expelled and own is None:
            text = f"{name} was killed: it had not ended after the others had continued without it."
            failure = FailureReport(text=text, status=1)
        # A signal to the process group of a worker is the user's wish, and no loss.
        stopped = event.returncode in _STOPPED  # with all others: a signal's cause is to come
        others = (one for rank, one in self._workers.items() if not self._serves(rank))
        begun = worker.survives or any(one.survives for one in others)
        if not begun or stopped or (own is not None and not own.consequence):
            return failure  # no loss to report: the others end, too
        self._lost[name] = failure
        if self._servers is not None and self._serves(local_rank):
            workers = len(self._run.generation.members)
            print_message(f"{failure.text} {self._servers.after_loss(workers)}")
        elif not all(map(self._serves, self._workers)):
            print_message(f"{failure.text} The others decide how the run continues.")
        # The members print that they continue: a user sees the cause before.
        self._report_exit(local_rank, name, failure.text, failed=True)
        return None

    @property
    def _all_lost(self) -> bool:
        """Whether all workers are lost; servers may still wait for others."""
        count = 0 if self._servers is None else self._servers.count
        servers = {self._name(self._plan.workers + number) for number in range(count)}
        return len(self._lost.keys() - servers) == self._plan.workers

    def _serves(self, local_rank: int) -> bool:
        """Return whether a process is a server."""
        return local_rank >= self._plan.workers

    def _report_exit(self, local_rank: int, name: str, text: str, *, failed: bool) -> None:
        if self._endpoint is not None:
            member = "" if self._serves(local_rank) else self._member(local_rank).id
            self._endpoint.exited(
                WorkerExit(
                    local_rank=local_rank,
                    member=member,
                    name=name,
                    text=text,
                    failed=failed,
                )
            )

    def _end(self) -> None:
        """Wait for the workers, which have SIGTERM; kill them after the limit or a signal."""
        limit = _SAVE_S if self._hurried else _TERM_S
        if self._ended_within(limit - _REPORT_S, hurry=True):
            return
        self._signal(signal.SIGKILL)
        deadline = time.monotonic() + _REAP_S
        while not self._ended_within(_KILL_S, hurry=False):
            hung = [self._name(rank) for rank, worker in self._workers.items() if worker.hangs()]
            if hung:
                # A dead NFS server keeps a process for as long
                # as it likes: nothing is gained by waiting.
                print_message(f"{', '.join(hung)} can't be killed: a system call hangs.")
                return
            if time.monotonic() > deadline:
                names = ", ".join(map(self._name, self._workers))
                print_message(f"{names} did not end within {_REAP_S:g} s after SIGKILL.")
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
                self._hurried = True
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
            lost = self._lost_machines
            served = self._run.registered.rendezvous.served_by_run
            try:
                self._run.deregister(self._events.pause, self._plan.timeout, lost=lost)
            except STORE_ERRORS as error:
                if not (served and 0 in lost):  # else the store is lost with machine 0
                    print_message(f"the rendezvous couldn't be cleaned up: {error}")

    def _machines_lost(self) -> frozenset[int]:
        """Return the machines without which the run continued."""
        if self._endpoint is None:
            return frozenset()
        return frozenset(filter(self._endpoint.is_lost, range(self._plan.machines)))

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            worker.send(number)

    def _name(self, local_rank: int) -> str:
        if self._servers is not None and self._serves(local_rank):
            return f"{self._servers.name(local_rank - self._plan.workers)} on {self._machine()}"
        generation = self._run.generation
        if self._endpoint is not None:
            return self._endpoint.name_of(self._member(local_rank).id)
        return generation.describe(generation.rank_of(self._plan.machine, local_rank))

    def _machine(self) -> str:
        return f"machine {self._plan.machine} ({self._member(0).host})"

    def _member(self, local_rank: int) -> Member:
        generation = self._run.generation
        return generation.members[generation.rank_of(self._plan.machine, local_rank)]


def reason_of(event: signal.Signals | FailureReport, machine: str) -> FailureReport:
    """Return the reason for the run's end that an event is.

    Args:
        event: a signal, or another machine's reason.
        machine: this machine's name.
    """
    if isinstance(event, FailureReport):
        return event
    return FailureReport(text=f"stopped by {event.name} on {machine}.", status=128 + event)
