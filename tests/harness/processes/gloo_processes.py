"""Runs a function on several real processes connected by Gloo."""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import TCPStore

from paceline.comm.process_group import ProcessGroupCommunicator

LIMIT = 60.0


def spawn(world_size: int, function: Callable[..., Any], *args: object) -> list[Any]:
    """Call `function(communicator, *args)` on each rank; return the ranks' results.

    Raises:
        RuntimeError: a rank failed (its traceback) or said nothing within `LIMIT` seconds.
    """
    store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    ends: list[Connection] = []
    ranks = []
    for rank in range(world_size):
        ours, theirs = get_context("forkserver").Pipe(duplex=False)
        rendezvous = (rank, world_size, store.port)
        process = get_context("forkserver").Process(
            target=_rank, args=(theirs, rendezvous, function, args), daemon=True
        )
        process.start()
        theirs.close()
        ends.append(ours)
        ranks.append(process)
    try:
        return _collect(ends)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _collect(ends: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        waiting = [end for rank, end in enumerate(ends) if rank not in results]
        ready = wait(waiting, timeout=LIMIT)
        if not ready:
            raise RuntimeError(f"ranks other than {sorted(results)} said nothing for {LIMIT} s")
        for end in ready:
            assert isinstance(end, Connection)
            rank = ends.index(end)
            ok, value = torch.load(io.BytesIO(end.recv_bytes()), weights_only=False)
            if not ok:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ends))]


def _rank(
    pipe: Connection, rendezvous: tuple[int, int, int], function: Callable[..., Any], args: Any
) -> None:
    rank, world_size, port = rendezvous
    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, world_size, is_master=False)
        communicator = ProcessGroupCommunicator(
            store,
            rank=rank,
            world_size=world_size,
            device=torch.device("cpu"),
            address="127.0.0.1",
            first_timeout=30,
            timeout=30,
        )
        store.set(f"connected/{rank}", "")
        store.wait([f"connected/{each}" for each in range(world_size)])  # one may close at once
        _send(pipe, (True, function(communicator, *args)))
    except BaseException:
        _send(pipe, (False, traceback.format_exc()))


def _send(pipe: Connection, answer: tuple[bool, Any]) -> None:
    """Send an answer whole: a tensor sent as it is would be shared, and gone with its process."""
    file = io.BytesIO()
    torch.save(answer, file)
    pipe.send_bytes(file.getvalue())
