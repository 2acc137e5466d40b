"""A program of its own: give all of mpirun's processes the bytes that rank 0 has.

    stdin of rank 0  ->  MPI_Bcast of the length, MPI_Bcast of the bytes  ->  stdout of every rank

It runs beside the process that mpirun started, in its place towards mpirun, because MPI's start
has no time limit and keeps Python's lock: from outside it can be given up.
"""

from __future__ import annotations

import sys

from mpi4py import MPI


def main() -> None:
    """Broadcast standard input to standard output."""
    world = MPI.COMM_WORLD
    text = sys.stdin.buffer.read() if world.rank == 0 else b""
    length = bytearray(len(text).to_bytes(4, "big"))
    world.Bcast([length, MPI.BYTE], root=0)
    shared = bytearray(text.ljust(int.from_bytes(length, "big")))
    world.Bcast([shared, MPI.BYTE], root=0)
    sys.stdout.buffer.write(shared)


main()
