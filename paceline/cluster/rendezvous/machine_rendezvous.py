"""How machines form one run: machine 0 opens it, the others find it, all learn their addresses.

    machine 0                                 machine i
    make sure that the run isn't alive        wait for a live incarnation
    open an incarnation                       claim machine/<i>
    claim machine/0, wait for all claims      wait for the world
    write the world (claims, job token)       read it
    ------------- all: connect to each other's addresses, post which ones worked -------------
    every machine's address is the first of its own at which all others reached it

A machine alone goes the same way, with a store of its own on 127.0.0.1.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from paceline.cluster.membership.lease_watch import LeaseWatch
from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.rendezvous.deadline import Deadline, name_machines
from paceline.cluster.rendezvous.follower import follow
from paceline.cluster.rendezvous.leader import seal, take_over
from paceline.cluster.rendezvous.reachability import (
    ProbeListener,
    candidates,
    choose,
    interfaces,
    reach,
)
from paceline.cluster.rendezvous.registered_machine import STORE_LIMIT, RegisteredMachine
from paceline.cluster.rendezvous.registration import (
    GenerationInfo,
    MachineRegistration,
    RegisteredWorld,
)
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.store_spec import StoreSpec, peek, run_space
from paceline.cluster.stores.tcp_store import serve_tcp, split_address
from paceline.cluster.supervision.failure_report import FailureReport
from paceline.cluster.supervision.formed_run import FormedRun
from paceline.errors import CommError

_CONNECT_S = 60.0
_JUDGE_S = 5.0


def open_run(
    plan: RunPlan,
    *,
    tell: Callable[[str], None],
    notice: Callable[[FailureReport], None],
    warn: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> FormedRun:
    """Form a run with the other machines.

    Args:
        plan: this machine's part.
        tell: receives lines about whom the start waits for.
        notice: receives, from another thread, the failure that a machine gives for the run's end.
        warn: receives, from another thread, a line if the meeting place is lost.
        pause: sleeps; may raise to end the wait.

    Raises:
        ConfigError: the run is alive already, the machine's number is taken, the numbers of
            machines differ, or the meeting place is wrong.
        CommError: a machine didn't come in time, or can't be reached.
        Finished: the run came to its end before.
    """
    remedy = f"start {'them' if plan.machines > 2 else 'it'} with --run_id {plan.run_id} and the "
    remedy += "same meeting place, or give a longer --first_iter_timeout"
    deadline = Deadline(plan.first_iter_timeout, tell, pause, remedy)
    with ExitStack() as undo:
        listener = undo.enter_context(ProbeListener())
        registration = registration_of(plan, listener)
        try:
            server, registered, world = _register(plan, registration, deadline, notice, warn)
            undo.callback(registered.abandon)
            generation_info = _form(registered, world, listener, deadline)
        except DistError as error:
            reason = str(error).splitlines()[0]
            raise CommError(f"The meeting place was lost during the start: {reason}") from error
        undo.pop_all()
        listener.close()
    return FormedRun(registered, generation_info, server)


def registration_of(plan: RunPlan, listener: ProbeListener) -> MachineRegistration:
    """Make this machine's entry, new at each call."""
    addresses = candidates(interfaces(), plan.interfaces) if plan.machines > 1 else ("127.0.0.1",)
    return MachineRegistration(
        id=uuid.uuid4().hex,
        who=ProcessIdentity.of_this_process(),
        workers=plan.workers,
        addresses=addresses,
        port=listener.port,
    )


def _register(
    plan: RunPlan,
    registration: MachineRegistration,
    deadline: Deadline,
    notice: Callable[[FailureReport], None],
    warn: Callable[[str], None],
) -> tuple[TCPStore | None, RegisteredMachine, RegisteredWorld]:
    def sit(meeting: StoreSpec, generation: str) -> RegisteredMachine:
        return RegisteredMachine(plan, meeting, generation, registration, notice=notice, warn=warn)

    if plan.machine > 0:
        assert plan.meeting is not None
        meeting = plan.meeting
        return None, *follow(plan, registration, deadline, lambda name: sit(meeting, name))
    server, meeting = host(plan)
    registered = sit(meeting, take_over(plan, meeting, registration, deadline))
    try:
        return server, registered, seal(registered, deadline)
    except BaseException:
        registered.abandon()
        raise


def host(plan: RunPlan) -> tuple[TCPStore | None, StoreSpec]:
    """Serve the TCP store if that is where the run meets; return it and the way to it from here."""
    if plan.meeting is not None and plan.meeting.kind != "tcp":
        return None, plan.meeting
    if plan.meeting is None:
        server = serve_tcp("127.0.0.1", 0, STORE_LIMIT)
        space = run_space(plan.run_id)
    else:
        server = serve_tcp("", split_address(plan.meeting.address)[1], STORE_LIMIT)
        space = plan.meeting.space
    return server, StoreSpec(kind="tcp", address=f"127.0.0.1:{server.port}", space=space)


def _form(
    registered: RegisteredMachine,
    world: RegisteredWorld,
    listener: ProbeListener,
    deadline: Deadline,
) -> GenerationInfo:
    generation_info = GenerationInfo(
        token=world.token,
        machines=world.machines,
        addresses=("127.0.0.1",) * len(world.registrations),
        hosts=world.hosts,
    )
    one_place = len({registration.who.network for registration in world.registrations}) == 1
    if not one_place or registered.plan.interfaces:
        listener.answer(world.token, registered.plan.machine)
        generation_info = replace(
            generation_info, addresses=_addresses(registered, world, deadline)
        )
    registered.store.set(registered.key("formed"), generation_info.to_text())
    return generation_info


def _addresses(
    registered: RegisteredMachine, world: RegisteredWorld, deadline: Deadline
) -> tuple[str, ...]:
    numbers = range(len(world.registrations))
    others = {
        machine: (world.registrations[machine].addresses, world.registrations[machine].port)
        for machine in numbers
        if machine != registered.plan.machine
    }
    found = reach(world.token, registered.plan.machine, others, deadline.pause)
    registered.store.set(registered.key("reach"), json.dumps(found))
    _await_reports(registered, world, deadline.at_most(_CONNECT_S, "start the run again"))
    reports = [
        json.loads(registered.store.get(registered.key("reach", machine))) for machine in numbers
    ]
    reached = [{int(peer): tries for peer, tries in report.items()} for report in reports]
    registered.store.set(registered.key("judged"), "1")
    try:
        return choose([registration.addresses for registration in world.registrations], reached)
    except CommError:
        # All machines judge the same reports, and machine 0 takes them away when it leaves.
        until = time.monotonic() + _JUDGE_S
        judged = [registered.key("judged", machine) for machine in numbers]
        while not registered.store.check(judged) and time.monotonic() < until:
            deadline.pause()
        raise


def _await_reports(
    registered: RegisteredMachine, world: RegisteredWorld, deadline: Deadline
) -> None:
    watches = [
        LeaseWatch(registered.store, registration, registered.registration.who)
        for registration in world.registrations
    ]
    while missing := [
        machine
        for machine in range(len(watches))
        if peek(registered.store, registered.key("reach", machine)) is None
    ]:
        for machine in missing:
            verdict = watches[machine].verdict()
            if verdict.state == "dead":
                host = world.registrations[machine].who.host
                raise CommError(
                    f"Machine {machine} ({host}) ended during the start ({verdict.reason}): see "
                    "what it says, and start the run again."
                )
        deadline.wait(f"the connections of {name_machines(missing, len(watches))}")
