"""Checkpoints on disk: plain PyTorch files, written at once or not at all, the last few retained.

    <run>/checkpoints/step-00000128.pt     what a run resumes from after 128 steps
    <run>/checkpoints/best.pt              the one with the best test accuracy at an epoch's end

A file is a dict that `torch.load(path, weights_only=True)` reads; its "model" and "optimizer" are
ordinary state dicts. It is written at once, and then the folder is synced: a reader, after a power
cut too, finds it whole or not at all.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from paceline.atomic_write import PARTS, atomic_file, link_atomically
from paceline.errors import CheckpointError, Message
from paceline.state.file_integrity import check_header, check_integrity, load_file, reason_of

FORMAT = 1
FOLDER = "checkpoints"
BEST = "best.pt"
EXCHANGE = "exchange"  # what ranks had besides, where the exchange has state of its own
_NAME = re.compile(r"step-(\d+)(?:\.(\w[\w-]*))?\.pt")  # with the name of a part
_NEEDED = ("paceline", "model", "optimizer", "position")


def exchange_entry(pair: int) -> str:
    """Return the entry for what ranks had besides a pair of a model and an optimizer, by index."""
    return f"{EXCHANGE}_{pair + 1}" if pair else EXCHANGE


class Checkpoints:
    """Checkpoint files of one run.

    Args:
        run: the run's folder.
        keep: number of newest checkpoints to retain.
        part: the name of the part of the model that the files have; "": they have all of it.

    Attributes:
        complete_step: the number of completed steps in the newest checkpoint that has all its
            parts, as this member knows; later files of a part are not removed.
    """

    def __init__(self, run: Path, keep: int, part: str = "") -> None:
        self.folder = run / FOLDER
        self._keep = keep
        self._part = part
        self.complete_step = 0
        self._lineage: set[Path] = set()
        self._began = False
        self._lock = threading.Lock()  # held while files are removed, or the lineage is replaced

    def begin_generation(self, start: int) -> None:
        """Begin the files of a generation that continues after `start` steps.

        Its lineage consists of the files that are there, up to this step, and of those that are
        written from now on. Other files are void: they are neither counted nor removed.
        """
        with self._lock:
            self._lineage = {path for step, path in self._by_step().items() if step <= start}
            self._began = True

    def newest_first(self) -> list[Path]:
        """List the files, the one with the most steps first."""
        by_step = self._by_step()
        return [by_step[step] for step in sorted(by_step, reverse=True)]

    def newest_step(self) -> int | None:
        """Return the number of completed steps in the newest file, None if there is none."""
        with self._lock:
            if self._began:
                return max(map(_step_of, self._lineage), default=None)
        return max(self._by_step(), default=None)

    def _by_step(self) -> dict[int, Path]:
        found = [path for path in self.folder.glob("step-*.pt") if _part_of(path) == self._part]
        return {_step_of(path): path for path in found}

    def parts(self) -> list[Path]:
        """List the files of parts of the model."""
        return sorted(path for path in self.folder.glob("step-*.pt") if _part_of(path))

    def write(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        best: bool = False,
        require: Callable[[], None] = lambda: None,
        written: Callable[[Path], object] = lambda path: None,
    ) -> Path:
        """Publish the state before step `step`, and remove old files of the lineage.

        Nothing is removed if a generation has begun meanwhile.

        Args:
            step: the number of completed steps.
            state: the file's entries.
            best: it is the best so far.
            require: called immediately before the file is published, and before old ones are
                removed; an error of it prevents that.
            written: called with the file, before old ones are removed.

        Raises:
            CheckpointError: the disk is full, or the folder can't be written.
        """
        ending = f".{self._part}.pt" if self._part else ".pt"
        path = self.folder / f"step-{step:08}{ending}"
        lineage = self._lineage
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # The best first: killed in between, a run repeats the epoch's end.
            first = self.folder / f"{BEST.removesuffix('.pt')}{ending}" if best else path
            with atomic_file(first, require) as file:
                torch.save({"paceline": FORMAT, **state}, file)
            if best:
                link_atomically(first, path)
            written(path)
            require()
            self._remove_old(path, lineage)
        except OSError as error:
            raise CheckpointError(
                Message(
                    "{}: the checkpoint can't be written ({}); make room, or give another "
                    "{--output_dir}. Earlier checkpoints are unchanged.",
                    path,
                    reason_of(error),
                )
            ) from error
        return path

    def _remove_old(self, path: Path, lineage: set[Path]) -> None:
        with self._lock:
            lineage.add(path)
            if lineage is not self._lineage:
                return
            # An index may name a part until all parts of a later checkpoint are written.
            complete = [
                one for one in lineage if not self._part or _step_of(one) <= self.complete_step
            ]
            for old in sorted(complete, key=_step_of, reverse=True)[self._keep :]:
                old.unlink(missing_ok=True)
                lineage.discard(old)

    def clean(self) -> None:
        """Remove what a killed writer left half done."""
        # Of the run's folder only weights: other machines may be writing the other files.
        for part in (*self.folder.glob(PARTS), *self.folder.parent.glob(f".*.pt{PARTS[2:]}")):
            part.unlink(missing_ok=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])


def _part_of(path: Path) -> str | None:
    """Return the name of the part that a file has, "" for all of the model; None: no checkpoint."""
    name = _NAME.fullmatch(path.name)
    return None if name is None else name[2] or ""


def read_checkpoint(path: Path, *, peek: bool = False) -> dict[str, Any]:
    """Read a checkpoint into this machine's memory.

    Args:
        peek: only look: tensors stay on the disk, and aren't compared with their checksums.

    Raises:
        CheckpointError: the file is torn, damaged, or something else; names it and the reason.
    """
    (check_header if peek else check_integrity)(path)
    return _checked(load_file(path, mmap=peek), str(path))


def load_state(file: BinaryIO, name: str) -> dict[str, Any]:
    """Load the contents of a checkpoint that another process has read and sent.

    Args:
        file: the contents.
        name: of the file, for messages.

    Raises:
        CheckpointError: they are damaged, or something else.
    """
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler raises a dozen kinds over damage
        raise CheckpointError(f"{name}: not a file of weights: {reason_of(error)}") from error
    return _checked(state, name)


def _checked(state: object, path: str) -> dict[str, Any]:
    missing = [name for name in _NEEDED if not isinstance(state, dict) or name not in state]
    if missing or not isinstance(state, dict):
        raise CheckpointError(
            f"{path}: not a run's checkpoint: it has no {missing[0]!r}; give one that a run wrote, "
            "or load weights with --weights."
        )
    if state["paceline"] > FORMAT:
        raise CheckpointError(
            f"{path}: written by a newer Paceline (format {state['paceline']}, this one reads "
            f"{FORMAT}); update Paceline."
        )
    return state
