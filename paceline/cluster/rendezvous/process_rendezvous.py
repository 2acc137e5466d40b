"""How the processes that a launcher started find each other and agree on ranks and machines.

    rank 0                                    rank i
    make a start: a space of a random id
    write its id to `start`                   wait for `start`; in its space, register
    wait for all registrations                as registration/<i>
    write `world`: these, and the job token   wait for a world that it is in
    -- local rank 0 of each machine: connect to each other's addresses, post which ones worked --
    every machine's address is the first of its own at which all others reached it

A `start` that an earlier, killed one has left in a folder or in Redis does no harm: each entry has
a random id, so a rank that waits there never finds itself in its world, and continues with the
newer start as soon as rank 0 has written that.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from paceline.cluster.launchers.launched_process import LaunchedProcess
from paceline.cluster.membership.generation import Generation, Group
from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.rendezvous.deadline import (
    Deadline,
    DeadlinePassed,
    describe_numbers,
    missing_numbers,
)
from paceline.cluster.rendezvous.reachability import (
    ProbeListener,
    agreed_addresses,
    own_addresses,
)
from paceline.cluster.rendezvous.registered_machine import STORE_LIMIT, read_registrations
from paceline.cluster.rendezvous.registration import RegisteredWorld, Registration
from paceline.cluster.stores.folder_store import FolderRemoved
from paceline.cluster.stores.store_spec import StoreSpec, erase, first_line, open_store, peek
from paceline.comm.addresses import loopback
from paceline.errors import CommError

START = "start"
_READ_S = 2.0


@dataclass(frozen=True, kw_only=True)
class FormedWorld:
    """A formed world, as one of its processes sees it.

    Attributes:
        group: all ranks.
        space: address of the store, with the key prefix of this start.
        store: the store, opened at `space`.
    """

    group: Group
    space: StoreSpec
    store: Store


def form_world(
    rendezvous: StoreSpec,
    launched: LaunchedProcess,
    interface_names: Sequence[str],
    deadline: Deadline,
) -> FormedWorld:
    """Find the other processes and form the world with them; collective.

    Args:
        rendezvous: the job's space in a store that all processes reach.
        launched: this process, as its launcher describes it.
        interface_names: the network interfaces to use; none: all.
        deadline: the limit.

    Raises:
        CommError: processes didn't come in time (names them), or can't reach each other.
        ConfigError: the launcher's numbers contradict each other, or there is no such interface.
    """
    with closing(ProbeListener()) as listener:
        own = Registration(
            rank=launched.rank,
            node=launched.node,
            local_rank=launched.local_rank,
            process=ProcessIdentity.of_this_process(),
            addresses=own_addresses(
                interface_names, other_machines=bool(interface_names) or not launched.one_machine
            ),
            port=listener.port,
        )
        try:
            register = _open if launched.rank == 0 else _find
            space, world = register(rendezvous, own, launched.world_size, deadline)
            store = open_store(space, STORE_LIMIT)
            group = _group(world, own, store, listener, interface_names, deadline)
        except DistError as error:
            raise CommError(
                f"The rendezvous was lost during the start: {first_line(error)}."
            ) from error
    return FormedWorld(group=group, space=space, store=store)


def _open(
    rendezvous: StoreSpec, own: Registration, world_size: int, deadline: Deadline
) -> tuple[StoreSpec, RegisteredWorld]:
    """Make a start, and wait for all."""
    job_store = open_store(rendezvous, STORE_LIMIT, make=True)
    old = peek(job_store, START)
    start_id = uuid.uuid4().hex
    space = rendezvous.subspace(start_id)
    store = open_store(space, STORE_LIMIT, make=True)
    store.set(f"registration/{own.rank}", own.to_text())
    # Last: a rank that reads the id finds the space that it names.
    job_store.set(START, start_id)
    if old is not None:
        erase(rendezvous.subspace(old.decode()))
    try:
        while missing := missing_numbers(store, "registration", world_size):
            deadline.check_and_pause(describe_numbers("rank", missing, world_size))
    except DeadlinePassed as error:
        _give_up(store, world_size, str(error), deadline)
        raise
    registrations = read_registrations(store, "registration", world_size)
    world = RegisteredWorld(
        token=secrets.token_hex(16), registrations=tuple(registrations.values())
    )
    store.set("world", world.to_text())
    return space, world


def _give_up(store: Store, world_size: int, reason: str, deadline: Deadline) -> None:
    """Report to the registered processes, and keep the store until they have read why."""
    registered = read_registrations(store, "registration", world_size)
    world = RegisteredWorld(token="", registrations=tuple(registered.values()), lost=reason)
    store.set("world", world.to_text())
    # The store may be rank 0's own, and end with it.
    readers = [f"read/{rank}" for rank in registered if rank > 0]
    read_deadline = time.monotonic() + _READ_S
    while not store.check(readers) and time.monotonic() < read_deadline:
        deadline.pause()


def _find(
    rendezvous: StoreSpec, own: Registration, world_size: int, deadline: Deadline
) -> tuple[StoreSpec, RegisteredWorld]:
    """Wait for a start, and for a world in it that this process is in."""
    job_store = _open_when_served(rendezvous, world_size, deadline)
    found: bytes | None = None
    missing = [0]
    while True:
        start_id = peek(job_store, START)
        with suppress(FolderRemoved):  # an earlier start's space, just now
            if start_id is not None and start_id != found:
                space = rendezvous.subspace(start_id.decode())
                store = open_store(space, STORE_LIMIT)
                store.set(f"registration/{own.rank}", own.to_text())
                found = start_id
            if found is not None:
                text = peek(store, "world")
                world = None if text is None else RegisteredWorld.from_text(text)
                if world is not None and own in world.registrations:
                    store.set(f"read/{own.rank}", "")
                    if world.lost:
                        raise CommError(world.lost)
                    return space, world
                missing = missing_numbers(store, "registration", world_size) or [0]
        deadline.check_and_pause(describe_numbers("rank", missing, world_size))


def _open_when_served(rendezvous: StoreSpec, world_size: int, deadline: Deadline) -> Store:
    """Open the store once it is there: rank 0 may be yet to serve it."""
    while True:
        try:
            return open_store(rendezvous, STORE_LIMIT)
        except CommError as error:
            deadline.check_and_pause(
                # A refused connection is no error yet: ranks start seconds apart.
                f"{describe_numbers('rank', [0], world_size)} ({str(error).rstrip('.')})"
            )


def _group(
    world: RegisteredWorld,
    own: Registration,
    store: Store,
    listener: ProbeListener,
    interface_names: Sequence[str],
    deadline: Deadline,
) -> Group:
    groups = world.processes_by_machine()
    machine = next(i for i, group in enumerate(groups) if own in group)
    addresses: tuple[str, ...] = (loopback(),) * len(groups)
    if interface_names or not world.one_network:
        leaders = [group[0] for group in groups]
        probing = listener if own in leaders else None
        addresses = agreed_addresses(store, world.token, leaders, machine, probing, deadline)
    generation = Generation.of_workers(
        [len(group) for group in groups],
        start_id=world.registrations[0].id,
        token=world.token,
        addresses=addresses,
        hosts=[group[0].process.host for group in groups],
    )
    return Group.world(generation, generation.rank_of(machine, groups[machine].index(own)))
