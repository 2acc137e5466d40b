"""End of a schedule: nothing more fails, and all messages arrive."""

from __future__ import annotations

from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.voting.successor import View
from tests.harness.membership.oracle import has_quorum
from tests.harness.membership.processes import Worker
from tests.harness.membership.world import World

_ROUNDS = 14


def is_promised(world: World, *, fair: bool) -> bool:
    """Return whether the text promises that the run goes on."""
    newest = _newest_known(world)
    witness = bool(world.nonce) and world.nonce == newest.witness
    members = {member.id for member in newest.members}
    alive = {machine.number for machine in world.machines.values() if machine.alive}
    left = any(worker.trains and worker.id in members for worker in world.workers)
    if left and has_quorum(newest, alive, witness=witness):
        return True
    machines = {worker.machine.number for worker in world.workers if worker.alive}
    return fair and has_quorum(world.oracle.first, machines, witness=bool(world.nonce))


def _newest_known(world: World) -> Generation:
    """Return the newest decided generation of which a process that is alive knows."""
    generation = newest = world.oracle.first
    known = {
        machine.record.generation.id
        for machine in world.machines.values()
        if machine.alive and machine.record.generation is not None
    }
    successors = world.oracle.successors
    while (successor := successors.get(generation.id)) is not None:
        generation = successor
        if generation.id in known:
            newest = generation
    return newest


def train_on(world: World) -> bool:
    """Let the run recover; return whether the newest generation trains."""
    for _ in range(_ROUNDS):
        _deliver_all(world)
        for worker in world.workers:
            world.enter(worker)
        newest = world.oracle.newest
        members = [world.by_id[member.id] for member in newest.members]
        formed = all(each.trains and each.generation.id == newest.id for each in members)
        if formed and not _promised_in(world, newest):
            return _commits(world, newest, members)
        _vote_of_the_lowest(world)
    return False


def _promised_in(world: World, generation: Generation) -> bool:
    machines = (world.machines[number] for number in generation.machines)
    return any(machine.record.has_promised(generation) for machine in machines)


def _commits(world: World, generation: Generation, members: list[Worker]) -> bool:
    """Train until one more snapshot is committed."""
    committed = world.oracle.committed[generation.id]
    before = len(committed)
    for _ in range(4 * world.interval + 4):
        for worker in members:
            world.training.exchange(worker, 1.0)
        for worker in sorted(members, key=lambda each: each.step):
            world.training.step(worker)
    return len(committed) > before


def _vote_of_the_lowest(world: World) -> None:
    """In each generation that has workers, the lowest one proposes."""
    lowest: dict[str, Worker] = {}
    for worker in sorted(world.workers, key=lambda each: each.id):
        if worker.trains:
            lowest.setdefault(worker.generation.id, worker)
    for worker in lowest.values():
        dead = (m.id for m in worker.generation.members if not world.by_id[m.id].trains)
        world.propose(worker, View(suspected=frozenset(dead)))
        _deliver_all(world)
        world.expire(worker)
        _deliver_all(world)


def _deliver_all(world: World) -> None:
    while world.flight:
        world.deliver(len(world.flight) - 1)
