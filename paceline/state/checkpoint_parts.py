"""Checkpoints in parts: a file for each part of the model, and an index once all are written.

    checkpoints/step-00000128.stage1of2.pt    a plain checkpoint of one stage
    checkpoints/step-00000128.json            the index: written last, when all parts are on disks

The first rank of each part writes it. No rank has another part's state. Rank 0 writes the index;
parts that none names are no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from paceline.atomic_write import write_atomically
from paceline.cluster.json_record import JsonRecord
from paceline.errors import CheckpointError, CommError
from paceline.state.checkpoint_files import FORMAT, Checkpoints, read_checkpoint
from paceline.state.checkpoint_writer import Checkpoint, WrittenFiles
from paceline.state.file_integrity import reason_of

INDEX_SUFFIX = ".json"


def part_name(lengths: Mapping[str, int], stage: int, tensor: int) -> str:
    """Return the name of a part of the model, as its file has it; "" where there is one part."""
    places = (("stage", stage), ("tensor", tensor))
    return "-".join(f"{axis}{at}of{lengths[axis]}" for axis, at in places if lengths[axis] > 1)


def part_names(lengths: Mapping[str, int]) -> list[str]:
    """Return the names of all parts."""
    return [
        part_name(lengths, stage, tensor)
        for stage in range(lengths["stage"])
        for tensor in range(lengths["tensor"])
    ]


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex(JsonRecord):
    """Index of a checkpoint in parts.

    Attributes:
        paceline: the format's number.
        step: the number of completed steps.
        generation: the id of the generation that wrote it.
        parts: the names of the parts.
        files: the name of each part's file.
    """

    paceline: int
    step: int
    generation: str
    parts: tuple[str, ...]
    files: tuple[str, ...]

    @classmethod
    def of_folder(cls, folder: Path) -> list[Self]:
        """Return the indexes in a folder that can be read."""
        found = []
        for path in folder.glob("step-*.json"):
            with suppress(OSError, CommError):
                found.append(cls.from_text(path.read_bytes()))
        return found


def read_parts(path: Path) -> dict[str, Any]:
    """Read a checkpoint in parts and join its stages' weights.

    Args:
        path: the index.

    Returns:
        a checkpoint's entry "model".

    Raises:
        CheckpointError: the index or a part is damaged or missing, or parts divide layers.
    """
    try:
        index = CheckpointIndex.from_text(path.read_bytes())
    except (OSError, CommError) as error:
        raise CheckpointError(
            f"{path}: not the index of a checkpoint in parts ({error}); give a file of weights."
        ) from error
    divided = [part for part in index.parts if "tensor" in part]
    if divided:
        raise CheckpointError(
            f"{path}: its parts, such as {divided[0]}, divide layers, which only the script that "
            "divided them can join: load them there, with model.whole_state_dict()."
        )
    missing = [name for name in index.files if not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: its part {missing[0]} isn't there: copy it from the machine of that stage "
            "into the folder."
        )
    weights: dict[str, Any] = {}
    for name in index.files:
        weights |= read_checkpoint(path.parent / name)["model"]
    return {"paceline": index.paceline, "model": weights}


class CheckpointParts:
    """Checkpoints of one member, in parts: what it has written, and as rank 0 the indexes.

    Args:
        own: the files of the own part.
        keep: the number of indexes to retain.
        parts: the names of all parts.
        files: notes the indexes; None: nothing does.

    Attributes:
        written_steps: the number of completed steps in the newest file of the own part; 0: none.
    """

    def __init__(
        self,
        own: Checkpoints,
        keep: int,
        parts: Sequence[str],
        files: WrittenFiles | None = None,
    ) -> None:
        self.written_steps = 0
        self._own = own
        self._folder = own.folder
        self._keep = keep
        self._parts = parts
        self._files = files
        self._newest: Checkpoint | None = None  # without its tensors

    def written(self, checkpoint: Checkpoint, path: Path) -> None:
        """Note a file of the own part; called by the thread that has written it."""
        header = {"lineage": checkpoint.state["lineage"]}
        self._newest = replace(checkpoint, state=header, parameters={})
        self.written_steps = checkpoint.step

    def complete(self) -> int | None:
        """Write the index of the own newest file, if this folder has all other parts, too.

        After a rescue, in which ranks write without each other: the last one finds all. Where their
        folders are on disks of their own, none does.

        Returns:
            the number of completed steps in the newest checkpoint with an index; None: there is
            none.

        Raises:
            CheckpointError: as `confirm`.
        """
        checkpoint = self._newest
        if checkpoint is not None and all(self._has(checkpoint, part) for part in self._parts):
            # No member is notified: this process may have left the world already.
            self._write_index(checkpoint)
        return max((index.step for index in CheckpointIndex.of_folder(self._folder)), default=None)

    def _has(self, checkpoint: Checkpoint, part: str) -> bool:
        """Return whether a part's file of a checkpoint is in this folder."""
        path = self._folder / f"step-{checkpoint.step:08}.{part}.pt"
        try:
            lineage = read_checkpoint(path, peek=True)["lineage"]
        except (CheckpointError, OSError):
            return False
        return bool(lineage[-1] == checkpoint.state["lineage"][-1])

    def note_complete(self, step: int) -> None:
        """Note that all parts of a checkpoint are written: older files may be removed."""
        self._own.complete_step = step

    def confirm(self, step: int) -> None:
        """Write the index of a checkpoint whose parts are all written, once; as rank 0.

        Raises:
            CheckpointError: the folder can't be written.
        """
        checkpoint = self._newest
        if checkpoint is None or checkpoint.step != step:
            return
        path = self._write_index(checkpoint)
        if self._files is not None:
            self._files.written(checkpoint, path)

    def _write_index(self, checkpoint: Checkpoint) -> Path:
        self._newest = None
        step = checkpoint.step
        index = CheckpointIndex(
            paceline=FORMAT,
            step=step,
            generation=checkpoint.state["lineage"][-1][0],
            parts=tuple(self._parts),
            files=tuple(f"step-{step:08}.{part}.pt" for part in self._parts),
        )
        path = self._folder / f"step-{step:08}.json"
        try:
            write_atomically(path, json.dumps(json.loads(index.to_text()), indent=2) + "\n")
            for old in sorted(self._folder.glob("step-*.json"), reverse=True)[self._keep :]:
                old.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{path}: the checkpoint's index can't be written ({reason_of(error)}); make room. "
                "Earlier checkpoints are unchanged."
            ) from error
        return path
