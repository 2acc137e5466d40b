"""Where a run goes on: from its newest good checkpoint, from another run's, or from the start.

Rank 0 reads the disk; the others get the state from it, so that machines needn't share a folder.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.comm.communicator import Communicator, broadcast_bytes
from paceline.config.run import OutputConfig
from paceline.config.train import difference
from paceline.errors import CheckpointError, ConfigError, Message
from paceline.replica.replica import Replica
from paceline.run.steps import Position
from paceline.state.checkpoint_files import EXCHANGE, Checkpoints, read_checkpoint
from paceline.state.run_folder import next_generation
from paceline.wiring.start_checks import check_origin


class Restorable(Protocol):
    """Something that takes its state back."""

    def load_state_dict(self, state: Any) -> Any:
        """Take the state."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a start of a run begins.

    Attributes:
        generation: of the world; one more at each start.
        state: the checkpoint, or None.
        origin: the file, where it is another run's.
        notes: what a person should know.
    """

    generation: int = 0
    state: Mapping[str, Any] | None = None
    origin: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def position(self) -> Position:
        """Where the steps go on."""
        if self.state is None:
            return Position()
        told = self.state["position"]
        return Position(**{f.name: told[f.name] for f in fields(Position)})

    def restore(self, parts: Mapping[str, Restorable]) -> None:
        """Give each part its state back, if there is one.

        Raises:
            ConfigError: the state is another model's or optimizer's.
        """
        for name, part in parts.items() if self.state is not None else ():
            try:
                part.load_state_dict(self.state[name])  # type: ignore[index]
            except (KeyError, RuntimeError, ValueError, TypeError) as error:
                reason = str(error).strip().splitlines()
                raise ConfigError(
                    flag="resume",
                    value=self.origin or "auto",
                    rule=f"the checkpoint's {name} doesn't fit: "
                    f"{' '.join(line.strip() for line in reason[:2])[:300].rstrip('.')}",
                    remedy=f"give the {name} that it was trained with",
                ) from error

    def restore_exchange(self, replica: Replica) -> tuple[str, ...]:
        """Give the exchange its state back, where there is any; return what to say of it."""
        state = None if self.state is None else self.state.get(EXCHANGE)
        if state is None or replica.restore(state):
            return ()
        return (
            "What the checkpoint's lossy wire had yet to send, less than a step's rounding, is "
            "dropped: nothing is rounded in this run.",
        )


def find_start(
    output: OutputConfig,
    run: Path,
    identity: Mapping[str, object],
    communicator: Communicator,
    device: torch.device,
) -> Start:
    """Find where the run goes on; collective.

    Args:
        output: says what to resume from.
        run: the run's folder, rank 0's.
        identity: what makes the run this one; a checkpoint of another is foreign.
        communicator: the ranks.
        device: where its tensors live.

    Raises:
        ConfigError: `--resume` names a file that isn't there.
        CheckpointError: there are checkpoints, and none can be read.
    """
    data = b""
    if communicator.rank == 0:
        file = io.BytesIO()
        start = _look(output, run, identity)
        torch.save({f.name: getattr(start, f.name) for f in fields(Start)}, file)
        data = file.getvalue()
    data = broadcast_bytes(communicator, data, device, "where rank 0 starts from")
    told = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return Start(**told)


def _look(output: OutputConfig, run: Path, identity: Mapping[str, object]) -> Start:
    run.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(run, output.keep_checkpoints)
    checkpoints.clean()
    found = list(checkpoints.newest_first())
    notes: list[str] = []
    for path, state in _readable(found, identity, notes):
        return _start(run, state, f"Resuming from {path}", None, notes)
    if found:
        raise CheckpointError(
            Message(
                "{} None of the {} checkpoints of run {} can be used: give another {--run_id}, or "
                "remove them to start the run from the beginning.",
                notes[0],
                len(found),
                run.name,
            )
        )
    if output.resume in ("auto", "no"):
        return Start(generation=next_generation(run))
    check_origin(output, run)
    path = Path(output.resume)
    return _start(run, read_checkpoint(path), f"Starting from {path}", str(path), notes)


def _readable(
    found: list[Path], identity: Mapping[str, object], notes: list[str]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in found:
        try:
            state = read_checkpoint(path)
        except CheckpointError as error:
            notes.append(str(error))
            continue
        if difference(state.get("config") or {}, identity):
            notes.append(f"{path}: the checkpoint of another run; it is left out.")
            continue
        yield path, state


def _start(
    run: Path, state: Mapping[str, Any], what: str, origin: str | None, notes: list[str]
) -> Start:
    position = state["position"]
    epoch, step = position["epoch"], position["step"]
    where = f"epoch {epoch + 1}, {_done(step, 'step')}." if step else f"{_done(epoch, 'epoch')}."
    own = 0 if origin else position["generation"] + 1
    return Start(
        generation=next_generation(run, own),
        state=state,
        origin=origin,
        notes=(*notes, f"{what}: {where}"),
    )


def _done(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'} done"
