"""Generations of a few workers, for tests of the vote."""

from __future__ import annotations

from dataclasses import replace

from paceline.cluster.membership.generation import Generation, Member


def member(id: str, machine: int, local_rank: int = 0) -> Member:
    """Return a worker without an address."""
    return Member(id=id, role="worker", machine=machine, local_rank=local_rank, address="", host="")


def first_generation(
    *workers_per_machine: int, token: str = "first", witness: str = ""
) -> Generation:
    """Return the first generation, with the workers w0, w1 and so on."""
    machines = [number for number, count in enumerate(workers_per_machine) for _ in range(count)]
    members = tuple(
        member(f"w{rank}", machine, rank - machines.index(machine))
        for rank, machine in enumerate(machines)
    )
    return Generation(number=0, token=token, members=members, witness=witness)


def next_generation(generation: Generation, token: str) -> Generation:
    """Return a successor with the same members, which starts where its parent did."""
    return replace(
        generation, number=generation.number + 1, token=token, ancestors=generation.lineage
    )
