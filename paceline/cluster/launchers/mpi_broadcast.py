"""A program of its own: give all of mpirun's processes the bytes that rank 0 has.

    stdin of rank 0  ->  MPI_Bcast of the length, MPI_Bcast of the bytes  ->  stdout of every rank

It runs as a child that takes over the process's MPI rank: MPI_Init has no timeout and holds the
GIL, but a child can be killed.
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
