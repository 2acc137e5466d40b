"""Groups of all ranks of a world, as one rank sees them, without a rendezvous."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cluster.membership.generation import Generation, Group


def world_of(
    workers_per_machine: Sequence[int] = (1,),
    rank: int = 0,
    *,
    addresses: Sequence[str] = (),
    hosts: Sequence[str] = (),
    token: str = "token",
) -> Group:
    """Return the group of all ranks of a world, as `rank` sees it.

    Args:
        workers_per_machine: for each machine, its number of workers.
        rank: the rank that sees it.
        addresses: for each machine, its address; by default 127.0.0.1.
        hosts: for each machine, its host name; by default a, b, c, ….
        token: the job token.
    """
    machines = len(workers_per_machine)
    generation = Generation.of_workers(
        workers_per_machine,
        start_id="start",
        token=token,
        addresses=addresses or ("127.0.0.1",) * machines,
        hosts=hosts or [chr(ord("a") + machine) for machine in range(machines)],
    )
    return Group.world(generation, rank)
