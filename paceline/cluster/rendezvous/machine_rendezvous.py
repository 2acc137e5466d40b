"""How machines form one run: machine 0 opens it, the others find it, all learn their addresses.

    machine 0                                 machine i
    make sure that the run isn't alive        wait for a live start
    open a start                              register as machine/<i>
    register, wait for all registrations      wait for the world
    write the world (with the job token)      read it
    ------------- all: connect to each other's addresses, post which ones worked -------------
    every machine's address is the first of its own at which all others reached it

A machine alone goes the same way, with a store of its own on 127.0.0.1.
"""

from __future__ import annotations

from contextlib import ExitStack, closing, suppress
from dataclasses import replace

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.print_message import print_message
from paceline.cluster.rendezvous.deadline import Deadline, PrintedWaits
from paceline.cluster.rendezvous.follower import follow
from paceline.cluster.rendezvous.formed_run import FormedRun
from paceline.cluster.rendezvous.leader import complete_world, take_over
from paceline.cluster.rendezvous.reachability import (
    ProbeListener,
    agreed_addresses,
    listening_address,
    own_addresses,
)
from paceline.cluster.rendezvous.registered_machine import (
    FINISHED,
    STORE_LIMIT,
    RegisteredMachine,
)
from paceline.cluster.rendezvous.registration import (
    RegisteredWorld,
    Registration,
    RunRecord,
)
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.rendezvous.start_events import StartEvents
from paceline.cluster.stores.store_spec import (
    STORE_ERRORS,
    StoreSpec,
    first_line,
    open_store,
    peek,
    run_space,
)
from paceline.cluster.stores.tcp_store import serve_tcp, split_address
from paceline.comm.addresses import host_and_port, interfaces, is_loopback, loopback
from paceline.errors import CommError


def open_run(plan: RunPlan, events: StartEvents) -> FormedRun:
    """Form a run with the other machines.

    Args:
        plan: this machine's part.
        events: receives what a machine gives as the reason for the run's end, and a note if the
            store is lost; may end a wait.

    Raises:
        ConfigError: the run is alive already, the machine's number is taken, the numbers of
            machines differ, or the rendezvous is wrong.
        CommError: a machine didn't come in time, or can't be reached.
        Finished: the run came to its end before.
    """
    remedy = (
        f"start {'them' if plan.machines > 2 else 'it'} with --run_id {plan.run_id} and the same "
        "rendezvous, or give a longer --first_iter_timeout"
    )
    deadline = Deadline(plan.first_iter_timeout, remedy, waits=PrintedWaits(), events=events)
    with ExitStack() as undo:
        listener = undo.enter_context(closing(ProbeListener()))
        registration = registration_of(plan, listener)
        server: TCPStore | None = None
        try:
            if plan.machine == 0:
                server, rendezvous = serve_if_needed(plan)
                start_id = take_over(plan, rendezvous, registration, deadline)
                registered = RegisteredMachine(plan, rendezvous, start_id, registration, events)
                undo.callback(registered.abandon)
                world = complete_world(registered, deadline)
            else:
                registered, world = follow(plan, registration, deadline, events)
                undo.callback(registered.abandon)
            generation = _first_generation(registered, world, listener, deadline)
        except DistError as error:
            raise CommError(
                f"The rendezvous was lost during the start: {first_line(error)}."
            ) from error
        # From here on the registration is the formed run's, which deregisters at its end.
        undo.pop_all()
        listener.close()
    return FormedRun(registered=registered, world=world, generation=generation, server=server)


def answer_finished(plan: RunPlan, limit: float = 5.0) -> None:
    """Report to the machines that come within the limit that the run is over; for machine 0.

    The machines wait for machine 0, as its store may have ended with it. Started again it finds its
    run folder marked, and opens a start of the run that never trains. Nothing is lost if the
    rendezvous fails: the machines wait, as for any other.

    Args:
        plan: machine 0's part in the run.
        limit: seconds to wait for machines to come.
    """
    deadline = Deadline(limit, "")
    with suppress(*STORE_ERRORS), closing(ProbeListener()) as listener:
        server, rendezvous = serve_if_needed(plan, quiet=True)
        found = (
            None
            if server is not None
            else peek(open_store(rendezvous, STORE_LIMIT, make=True), "run")
        )
        if found is not None:
            last = rendezvous.subspace(RunRecord.from_text(found).generation)
            if peek(open_store(last, STORE_LIMIT), FINISHED) is not None:
                # The run has finished; its server was left for a machine that was killed.
                return
        registration = registration_of(plan, listener)
        start_id = take_over(plan, rendezvous, registration, deadline)
        registered = RegisteredMachine(plan, rendezvous, start_id, registration)
        try:
            registered.store.set(FINISHED, "1")
            registered.store.set(registered.key("left"), "1")
            while not registered.all_left():
                deadline.check_and_pause("the other machines")
        finally:
            registered.abandon()


def registration_of(plan: RunPlan, listener: ProbeListener) -> Registration:
    """Make this machine's registration, new at each call."""
    return Registration(
        process=ProcessIdentity.of_this_process(),
        workers=plan.workers,
        rank=plan.machine,
        addresses=own_addresses(plan.interfaces, other_machines=plan.machines > 1),
        port=listener.port,
    )


def serve_if_needed(plan: RunPlan, *, quiet: bool = False) -> tuple[TCPStore | None, StoreSpec]:
    """Serve the TCP store if that is where the run's rendezvous is.

    Args:
        plan: machine 0's part.
        quiet: as of `serve`.

    Returns:
        the store's server, if there is one, and the way to the store from this machine.
    """
    rendezvous = plan.rendezvous
    if rendezvous is None:
        server = serve_tcp(loopback(), 0, STORE_LIMIT)
        return server, StoreSpec(
            kind="tcp", address=host_and_port(loopback(), server.port), space=run_space(plan.run_id)
        )
    if not rendezvous.served_by_run:
        return None, rendezvous
    return serve(rendezvous, plan.interfaces, quiet=quiet)


def serve(
    rendezvous: StoreSpec,
    interface_names: tuple[str, ...],
    port_source: str = "--master",
    *,
    quiet: bool = False,
) -> tuple[TCPStore, StoreSpec]:
    """Serve a TCP store on the interface of its address.

    Args:
        rendezvous: the store, as an option or a launcher gives it.
        interface_names: the network interfaces to use; none: all.
        port_source: the option or variable that names the port.
        quiet: whether no warning is printed if any process that reaches the store can join.

    Returns:
        the store's server, and the way to the store from this machine.

    Raises:
        ConfigError: the port can't be had.
    """
    name, port = split_address(rendezvous.address)
    address = listening_address(name, interfaces(), interface_names)
    server = serve_tcp(address, port, STORE_LIMIT, port_source)
    # No other machine reaches a loopback address, and a secret keeps out who does.
    if not quiet and not is_loopback(address) and not rendezvous.secret:
        print_message(UNPROTECTED_STORE_WARNING.format(address or "all interfaces", server.port))
    return server, replace(rendezvous, address=host_and_port(address or loopback(), server.port))


UNPROTECTED_STORE_WARNING = (
    "any process that reaches port {1} on {0} can join this run and read its job token: give all "
    "machines the same secret, with PACELINE_SECRET or --secret_file."
)


def _first_generation(
    registered: RegisteredMachine,
    world: RegisteredWorld,
    listener: ProbeListener,
    deadline: Deadline,
) -> Generation:
    store = registered.store
    machine = registered.plan.machine
    registrations = world.registrations
    addresses: tuple[str, ...] = (loopback(),) * len(registrations)
    if not world.one_network or registered.plan.interfaces:
        watches = [registered.watch(entry) for entry in registrations]

        def check(missing: list[int]) -> None:
            for peer in missing:
                verdict = watches[peer].verdict()
                if verdict.state == "dead":
                    raise CommError(
                        f"Machine {peer} ({registrations[peer].process.host}) ended during the "
                        f"start ({verdict.reason}): check the output of that machine, and start "
                        "the run again."
                    )

        addresses = agreed_addresses(
            store, world.token, registrations, machine, listener, deadline, check
        )
    generation = Generation.of_workers(
        [entry.workers for entry in registrations],
        start_id=registered.start_id,
        token=world.token,
        addresses=addresses,
        hosts=[entry.process.host for entry in registrations],
    )
    store.set(registered.key("formed"), generation.to_text())
    return generation
