"""Transfer of a checkpoint: to the ranks whose machine lacks the file, in pieces.

rank     0         1         2
reads    -         the file  the file
receives ◀── rank 1 sends        where all ranks have the file, nothing is sent
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from paceline.comm.communicator import gather_bytes
from paceline.errors import CheckpointError
from paceline.generation.run import Run
from paceline.state.checkpoint_files import load_state, read_checkpoint

PIECE = 16 * 2**20  # bytes that are sent at once
# A rank's report, unless it is the sentence of an error, or b"": it lacks a file that it needs.
_READ = b"\0"
_HAS = b"\1"  # the file, which it doesn't need
_NEEDS_NONE = b"\2"  # and lacks it


def fetch_checkpoint(
    run: Run, path: Path | None, size: int, *, needed: bool = True
) -> dict[str, Any]:
    """Return the contents of a checkpoint on all ranks, in this machine's memory; collective.

    Args:
        run: connects the ranks.
        path: the file on this rank's machine; None if the machine lacks it.
        size: of the file, in bytes.
        needed: whether this rank needs the contents; otherwise it gets none.

    Raises:
        CheckpointError: no rank can read the file; the sentence is that of the first one.
    """
    communicator = run.context.group("all", "steps")
    state = None
    report = b"" if needed else _NEEDS_NONE if path is None else _HAS
    if path is not None and needed:
        try:
            state = read_checkpoint(path)
            report = _READ
        except CheckpointError as error:
            report = str(error).encode()
    reports = gather_bytes(communicator, report, "the reading of a checkpoint")
    source = next((rank for rank, each in enumerate(reports) if each in (_READ, _HAS)), None)
    if source is None:
        raise CheckpointError(next(each for each in reports if each > _NEEDS_NONE).decode())
    if all(each in (_READ, _HAS, _NEEDS_NONE) for each in reports):
        return state or {}
    received = io.BytesIO()
    file = None if communicator.rank != source or path is None else path.open("rb")
    try:
        for start in range(0, size, PIECE):
            length = min(PIECE, size - start)
            piece = torch.zeros(length, dtype=torch.uint8)  # of ranks that send nothing
            if file is not None:
                piece = torch.frombuffer(bytearray(file.read(length)), dtype=torch.uint8)
            communicator.all_reduce(piece).wait("the transfer of a checkpoint")
            if state is None and needed:
                received.write(piece.numpy().tobytes())
    finally:
        if file is not None:
            file.close()
    received.seek(0)
    if state is None and needed:
        state = load_state(received, str(path or "the checkpoint"))
    return state or {}
