"""Where a run resumes: its newest valid checkpoint, another run's checkpoint, or the beginning.

The folders of all machines are looked into, which needn't be shared. The ranks whose machine lacks
the checkpoint get it from one that has it.

A checkpoint has a position in an epoch. With other data, or batches of another size, that position
is another one: samples would be lost, or trained twice. So this is checked before a run starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.cluster.membership.generation import Group
from paceline.cluster.membership.lineage import Lineage
from paceline.config.run import OutputConfig
from paceline.config.world import SyncConfig
from paceline.data.order import Order
from paceline.errors import CheckpointError, ConfigError, Message
from paceline.generation.context import GenerationContext
from paceline.generation.run import Run
from paceline.observe.csv_log import Totals
from paceline.reduce.rank_state import BUCKET_MB, MISSED
from paceline.replica.averaged_hooks import AVERAGE, WORKERS
from paceline.replica.replica import Replica
from paceline.session.resume.checkpoint_transfer import fetch_checkpoint
from paceline.session.resume.edits import GIVEN, RESET, GivenHyperparameters, require_options
from paceline.session.resume.machine_folders import (
    Candidate,
    FolderRecord,
    candidates,
    first_of_machine,
    gather_records,
    known_lineages,
    look_into,
    record_group,
    totals_before,
)
from paceline.snapshots.position import Position
from paceline.state.checkpoint_choice import ancestors_of_start
from paceline.state.checkpoint_files import Checkpoints, exchange_entry, read_checkpoint
from paceline.state.checkpoint_parts import part_name

_EARLIER_MB = 16.0  # bucket size by default of lossy exchanges whose checkpoints don't record it


@dataclass(frozen=True, kw_only=True)
class Start:
    """Starting point of a run: the beginning, or a checkpoint.

    Attributes:
        generation: the number of the start's first generation, greater than all before.
        state: the contents of the checkpoint; None at the beginning of a run.
        origin: the checkpoint's path, if another run wrote it; else None.
        notes: sentences for the user.
        ancestors: the generations from which that generation descends.
        totals: totals of the CSV log after the epochs before it.
        given: the hyperparameters of this start, whose edits replace the checkpoint's.
    """

    generation: int = 0
    state: Mapping[str, Any] | None = None
    origin: str | None = None
    notes: tuple[str, ...] = ()
    ancestors: Lineage = ()
    totals: Totals | None = None
    given: GivenHyperparameters = field(default_factory=GivenHyperparameters)

    @property
    def edited(self) -> Mapping[str, Any] | None:
        """The contents of the checkpoint, with the hyperparameters that this start edits.

        Raises:
            ConfigError: an optimizer is of another class than the checkpoint's.
        """
        return None if self.state is None else self.given.edited(self.state)

    def check_order(self, order: Order, fingerprint: str) -> None:
        """Check that the checkpoint, which may be another machine's, has the same data and batches.

        Raises:
            ConfigError: its run had other data or batches.
        """
        name = self.origin or "The run's newest checkpoint"
        check_order_of(self.state or {}, name, order, fingerprint)

    @property
    def position(self) -> Position:
        """Position of the first step."""
        if self.state is None:
            return Position()
        saved = self.state["position"]
        if self.origin is not None:  # another run has paid for the steps before
            saved = {**saved, "usage": {}}
        return Position(**{f.name: saved[f.name] for f in fields(Position) if f.name in saved})

    def restore(self, parts: Mapping[str, Any]) -> None:
        """Restore the state of each part by `load_state_dict()`, if there is a checkpoint.

        Raises:
            ConfigError: the state is another model's or optimizer's.
        """
        if self.state is None:
            return
        edited: Mapping[str, Any] | None = None
        for name, part in parts.items():
            # After the models: where these are others, the optimizer's parameters are, too.
            if edited is None and not isinstance(part, nn.Module):
                edited = self.edited
            try:
                part.load_state_dict((edited or self.state)[name])
            except (KeyError, RuntimeError, ValueError, TypeError) as error:
                reason = str(error).strip().splitlines()
                raise ConfigError(
                    flag="resume",
                    value=self.origin or "auto",
                    rule=f"the checkpoint's {name} doesn't fit: "
                    f"{' '.join(line.strip() for line in reason[:2])[:300].rstrip('.')}",
                    remedy=f"give the {name} that it was trained with",
                ) from error
            if isinstance(part, Optimizer):
                require_options(name, part)

    def restore_optimizer(self, optimizer: Optimizer, group: Group) -> None:
        """Restore a worker's own optimizer state, if the checkpoint is of a run of as many workers.

        Args:
            optimizer: the worker's, of a run that averages.
            group: the workers.
        """
        state = (self.edited or {}).get(exchange_entry(0), {})
        workers = state.get(AVERAGE, {}).get(WORKERS, ())
        if len(workers) == group.size:
            optimizer.load_state_dict(workers[group.rank]["optimizer"])

    def keep_bucket_size(self, config: SyncConfig, pair: int = 0) -> SyncConfig:
        """Return options with the checkpoint's bucket size, if none is given and bits depend on it.

        Args:
            config: the options.
            pair: the index of its model and optimizer, where there are several.
        """
        exchange = (self.state or {}).get(exchange_entry(pair), {})
        is_open = config.sync == "notified" and config.wire != "fp32" and not config.bucket_mb
        if not is_open or MISSED not in exchange:
            return config
        return replace(config, bucket_mb=exchange.get(BUCKET_MB) or _EARLIER_MB)

    def restore_exchange(self, replica: Replica, pair: int = 0) -> tuple[str, ...]:
        """Restore the exchange's state, if there is any; return sentences for the user.

        Args:
            pair: the index of its model and optimizer, where there are several.
        """
        state = (self.edited or {}).get(exchange_entry(pair))
        averages = replica.rounds is not None
        averaged = AVERAGE in (state or {})
        if averages and self.state is not None and not averaged:
            return (
                "The checkpoint is of a run that exchanged gradients: all workers begin with its "
                "weights, and each with its momenta.",
            )
        if averaged and not averages:
            return (
                "The checkpoint is of a run that averaged weights: training continues from the "
                "merged weights with the momenta of worker 0; the workers' own are dropped.",
            )
        if state is None or replica.restore(state):
            return ()
        if averaged:
            return (
                "The checkpoint is of a run with other workers or fragments: what they had of the "
                "round under way is dropped, and new workers begin with the merged weights.",
            )
        return (
            "The checkpoint's error-feedback residuals are dropped, because this run does not use "
            "a lossy wire.",
        )


def find_start(
    output: OutputConfig,
    folder: Path,
    identity: Mapping[str, object],
    run: Run,
) -> Start:
    """Find the starting point of a run, and number its first generation; collective.

    Each machine records the number and the lineage of each generation in its folder, so that the
    next start has another number, and descends from it, whichever machines it has.

    Args:
        output: says what to resume from.
        folder: the run's, on this machine; machines may share it.
        identity: flags that make it this run; another run's checkpoints are skipped.
        run: connects the ranks.

    Raises:
        ConfigError: `--resume` names a file that isn't there.
        CheckpointError: there are checkpoints, and none can be used; or two lineages committed
            steps.
        PacelineError: the folder can't be read or written.
    """
    group = run.context.world
    own = look_into(folder, output, identity) if first_of_machine(group) else None
    records = gather_records(run, own)
    start = _choose(output, folder, run, records)
    number = max(start.generation, *(record.number for record in records.values()))
    totals = totals_before(records, start.position.epoch)
    run.start_at(number, ancestors=start.ancestors, start=start.position.number)
    record_group(folder, run.context.world)
    given = GivenHyperparameters(reset_optimizer=output.reset_optimizer)
    return replace(start, generation=number, totals=totals, given=given)


def check_origin(output: OutputConfig, run: Path) -> None:
    """Check, without reading it, that the checkpoint to start from exists, if it is needed.

    Args:
        output: says what to resume from.
        run: the run's folder, rank 0's; a checkpoint of its own comes first.

    Raises:
        ConfigError: `--resume` names a file that isn't there.
    """
    if output.resume in ("auto", "no") or Checkpoints(run, 1).newest_first():
        return
    if not Path(output.resume).is_file():
        raise _no_origin(output)


def check_order(output: OutputConfig, run: Path, order: Order, fingerprint: str) -> None:
    """Check that the checkpoint to start from was made with the same data and batches.

    Args:
        output: says what to resume from.
        run: the run's folder, rank 0's; a checkpoint of its own comes first.
        order: of the images that the run will train.
        fingerprint: of these images; checkpoints of earlier versions have none.

    Raises:
        ConfigError: its run had other data or batches.
        CheckpointError: `--resume` names a file that is torn, or something else.
    """
    path, state = _peek(output, run)
    check_order_of(state, str(path), order, fingerprint)


def check_order_of(state: Mapping[str, Any], name: str, order: Order, fingerprint: str) -> None:
    """Check that a checkpoint was made with the same data and batches.

    Args:
        state: its contents.
        name: of the file, for messages.
        order: of the images that the run will train.
        fingerprint: of these images; checkpoints of earlier versions have none.

    Raises:
        ConfigError: its run had other data or batches.
    """
    if "order" not in state:
        return
    saved = _words(Order(**state["order"]))
    wanted = _words(order)
    if saved != wanted:
        raise ConfigError(
            f"{name} was written with {saved}, but this run has {wanted}. Use the same data and "
            "flags, or start a new run from its weights with --weights."
        )
    if state.get("data", fingerprint) != fingerprint:
        raise ConfigError(
            f"{name} was written with the same number of images, but the images or labels differ. "
            "Use the same data, or start a new run from its weights with --weights."
        )


def _choose(
    output: OutputConfig,
    folder: Path,
    run: Run,
    records: Mapping[int, FolderRecord],
) -> Start:
    """Read the newest checkpoint that can be read; collective."""
    group = run.context.world
    found, notes = candidates(records, group.generation)
    known = known_lineages(records)
    for candidate in found:
        try:
            state = fetch(run, candidate)
        except CheckpointError as error:
            notes.append(str(error))
        else:
            start = _start(state, f"Resuming from {candidate.name}", None, notes)
            return replace(start, ancestors=ancestors_of_start(candidate.header, known))
    if count := sum(record.count for record in records.values()):
        raise CheckpointError(
            Message(
                "{} No checkpoint of run {} ({} found) can be used: use another {--run_id}, or "
                "delete the checkpoints to restart the run.",
                notes[0],
                folder.name,
                count,
            )
        )
    ancestors = ancestors_of_start(None, known)
    if output.resume in ("auto", "no"):
        return Start(ancestors=ancestors)
    origin = _origin(output, group.generation.machine_of(0), records)
    state = fetch(run, origin)
    if GIVEN in state:  # another run's reset isn't this one's
        state[GIVEN] = {**state[GIVEN], RESET: False}
    start = _start(state, f"Starting from {output.resume}", output.resume, notes)
    return replace(start, ancestors=ancestors)


def fetch(run: Run, candidate: Candidate) -> dict[str, Any]:
    """Return a checkpoint's contents: of one in parts, those of this rank's part; collective."""
    context = run.context
    own = own_part_name(context)
    state: dict[str, Any] = {}
    for part, each in sorted(candidate.parts.items()) or [("", candidate)]:
        path = each.paths.get(context.world.machine)
        state |= fetch_checkpoint(run, path, each.file.size, needed=part == own)
    return state


def own_part_name(context: GenerationContext) -> str:
    """Return the name of the part of the model that this rank has; "": it has all of it."""
    places = (context.along(axis).rank for axis in ("stage", "tensor"))
    return part_name(context.mesh.lengths, *places) if context.mesh.divided else ""


def _origin(output: OutputConfig, first: int, records: Mapping[int, FolderRecord]) -> Candidate:
    """Return the file that `--resume` names, of rank 0's machine."""
    if not records[first].origin:
        raise _no_origin(output)
    (file,) = records[first].origin
    paths = {
        machine: Path(file.path)
        for machine, record in records.items()
        if [each.contents for each in record.origin] == [file.contents]
    }
    return Candidate(name=file.path, file=file, paths=paths)


def _no_origin(output: OutputConfig) -> ConfigError:
    return ConfigError(
        flag="resume",
        value=output.resume,
        rule="there is no such file",
        remedy="give 'auto', 'no', or the path of a checkpoint",
    )


def _start(state: Mapping[str, Any], what: str, origin: str | None, notes: list[str]) -> Start:
    position = state["position"]
    epoch = position["epoch"]
    step = position["step"]
    where = f"epoch {epoch + 1}, {_done(step, 'step')}." if step else f"{_done(epoch, 'epoch')}."
    return Start(
        generation=0 if origin else position["generation"] + 1,
        state=state,
        origin=origin,
        notes=(*notes, f"{what}: {where}"),
    )


def _peek(output: OutputConfig, run: Path) -> tuple[Path, Mapping[str, Any]]:
    """Read the header of the newest checkpoint that isn't torn; rank 0 names the torn ones."""
    own = Checkpoints(run, 1).newest_first()
    for path in own:
        with suppress(CheckpointError):
            return path, read_checkpoint(path, peek=True)
    if own or output.resume in ("auto", "no"):
        return run, {}
    return Path(output.resume), read_checkpoint(Path(output.resume), peek=True)


def _words(order: Order) -> str:
    return f"{order.size:,} images, {order.samples:,} per epoch and {order.batch_size:,} per step"


def _done(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'} done"
