"""Going back to the durable state in mid-run: to a checkpoint, or to the run's beginning.

    decided       a generation that starts from the durable state of step 12
    gathered      machine 0: steps 8, 12    machine 1: step 12     machine 2: none
    restored      step 12 of machine 0, which sends it to machine 2

The step is a part of the decision, so that a file that was written meanwhile changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.cluster.membership.generation import Group
from paceline.comm.communicator import broadcast_state, gather_bytes
from paceline.config.run import OutputConfig
from paceline.errors import CheckpointError, many
from paceline.generation.run import Run
from paceline.run.recovery.durable_state import Restored
from paceline.session.resume.edits import GivenHyperparameters
from paceline.session.resume.machine_folders import (
    candidate_of_step,
    first_of_machine,
    gather_records,
    look_into,
    record_group,
)
from paceline.session.resume.start import Start, fetch
from paceline.session.training import Training
from paceline.snapshots.position import Position

_REMEDY = (
    "Start the same command again: it resumes the run from its newest checkpoint, if there is one."
)


class DurableStart:
    """Start of a generation from the durable state; restores it on all ranks.

    Args:
        run: the run, whose present generation starts there.
        folder: the run's, on this machine.
        output: says which checkpoints are looked for.
        identity: flags that make it this run; another run's checkpoints are skipped.
        given: this start's hyperparameters, whose edits replace the checkpoint's.
        training: what is restored.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        output: OutputConfig,
        identity: Mapping[str, object],
        *,
        given: GivenHyperparameters,
        training: Training,
    ) -> None:
        self._run = run
        self._folder = folder
        self._output = output
        self._identity = identity
        self._given = given
        self._training = training
        self._start = Start()
        self._read_file = False

    def restore(self, reached: Position) -> Restored:
        """Restore model, optimizer and tracked objects; as `DurableState.restore`."""
        state, name = self._read()
        state = self._given.edited(state)
        start = Start(state=state)
        refusal = self._refusal(reached, start.position)
        try:
            if not refusal:
                self._training.restore(state)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            refusal = f"{name} doesn't fit the model and optimizer any more ({error})"
        what = "the restoring of a checkpoint"
        refusals = gather_bytes(self._run.context.group("all", "steps"), refusal.encode(), what)
        if any(refusals):
            reason = next(filter(None, refusals)).decode()
            raise CheckpointError(f"The run can't go back in its processes: {reason}. {_REMEDY}")
        self._start = start
        return Restored(position=start.position, name=name)

    def record(self, group: Group) -> None:
        """Record a generation, as `DurableState.record`."""
        record_group(self._folder, group)

    def restore_exchange(self) -> None:
        """Restore what ranks have besides; as `DurableState.restore_exchange`."""
        start = self._start
        self._start = Start()
        for pair, replica in enumerate(self._training.replicas):
            for note in start.restore_exchange(replica, pair):
                if self._read_file:  # the beginning has nothing that a checkpoint would have
                    self.report(note)

    def report(self, sentence: str) -> None:
        """Record a sentence for the user, and show it on rank 0."""
        self._run.note(sentence, shown=self._run.leads)

    def _refusal(self, reached: Position, back: Position) -> str:
        """Return why this run can't go back from one position to another; "" if it can."""
        if back.epoch == reached.epoch or not self._training.within_epoch:
            return ""
        return (
            f"the newest checkpoint is of epoch {back.epoch + 1}, and the script's loop is in "
            f"epoch {reached.epoch + 1}"
        )

    def _read(self) -> tuple[Mapping[str, Any], str]:
        """Return the durable state, and its name for messages; collective."""
        group = self._run.context.world
        own = None
        if first_of_machine(group):
            own = look_into(self._folder, self._output, self._identity, clean=False)
        records = gather_records(self._run, own)
        found = candidate_of_step(records, group.generation)
        self._read_file = found is not None
        if found is not None:
            return fetch(self._run, found), found.name
        beginning = self._training.beginning
        if group.generation.start or beginning is None:
            steps = many(group.generation.start, "step")
            reason = f"none of them can read the state after {steps}"
            if not group.generation.start:
                reason = "it has no checkpoint yet"
            raise CheckpointError(f"The run can't go back in its processes: {reason}. {_REMEDY}")
        entries = beginning.entries() if group.rank == 0 else None
        communicator = self._run.context.group("data", "steps")
        what = "the broadcast of the run's beginning"
        return broadcast_state(communicator, entries, what), "the run's beginning"
