"""Durable files: the checkpoints that this member can read, which votes may start from.

the writer    written ── "durable" frame ──▶ the others: the same file here? recorded
    └─ recorded
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.cluster.membership.protocol import Frames
from paceline.cluster.membership.voting.messages import Held
from paceline.errors import CheckpointError
from paceline.snapshots.backup import SnapshotBackup
from paceline.state.checkpoint_files import FOLDER
from paceline.state.checkpoint_writer import Checkpoint
from paceline.state.file_integrity import contents_id

_DURABLE = "durable"


class DurableFiles:
    """Durable files of one member.

    Args:
        frames: carries what members write to each other.
        backup: records what this member holds.
        folder: the run's, on this machine.
    """

    def __init__(self, frames: Frames, backup: SnapshotBackup, folder: Path) -> None:
        self._frames = frames
        self._backup = backup
        self._folder = folder
        frames.handle(_DURABLE, self)

    def written(self, checkpoint: Checkpoint, path: Path) -> None:
        """Report to all members that a checkpoint is on this machine's disk; from any thread."""
        (*_, (generation, _)) = checkpoint.state["lineage"]
        token = f"{checkpoint.name.token}:{checkpoint.name.step}"
        held = Held(generation=generation, token=token, step=checkpoint.step, durable=True)
        try:
            contents = contents_id(path)
        except (CheckpointError, OSError):
            if path.exists():
                raise
            return  # the next leader has removed it: this process was stopped meanwhile
        self._backup.add_durable(held)
        body: dict[str, Any] = {
            "generation": generation,
            "token": token,
            "step": held.step,
            "file": path.name,
            "contents": contents,
        }
        self._frames.broadcast(_DURABLE, body)

    def receive(
        self, peer: str, kind: str, body: Mapping[str, Any], bulk: bytes | bytearray
    ) -> None:
        """Note a checkpoint that another member has written, if this machine has the file, too."""
        with suppress(CheckpointError, OSError):
            path = self._folder / FOLDER / Path(body["file"]).name
            if contents_id(path) == body["contents"]:
                generation = body["generation"]
                token = body["token"]
                held = Held(generation=generation, token=token, step=body["step"], durable=True)
                self._backup.add_durable(held)
