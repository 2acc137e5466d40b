"""What the run folders of all machines have, gathered on all ranks.

    machine 0    step 8              ┐
    machine 1    step 8, step 12     ├ the same records on all ranks: step 12, of machine 1
    machine 2                        ┘

The first rank of each machine looks into its folder. Two machines with the same file, by its
contents, have one checkpoint; so have all those that share a folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.cluster.json_record import JsonRecord
from paceline.cluster.membership.generation import Ancestor, Generation, Group
from paceline.cluster.membership.voting.messages import Held
from paceline.cluster.membership.voting.successor import is_in_lineage
from paceline.comm.communicator import gather_bytes
from paceline.config.run import OutputConfig
from paceline.config.train import difference
from paceline.errors import CheckpointError
from paceline.generation.run import Run
from paceline.observe.csv_log import Totals, read_totals
from paceline.state.checkpoint_choice import CheckpointHeader, NumberedLineage, newest_valid
from paceline.state.checkpoint_files import Checkpoints, read_checkpoint
from paceline.state.checkpoint_parts import CheckpointIndex
from paceline.state.file_integrity import contents_id
from paceline.state.run_folder import (
    next_generation,
    record_generation,
    record_lineage,
    recorded_lineage,
)


@dataclass(frozen=True, kw_only=True)
class FoundFile:
    """Checkpoint file of one machine.

    Attributes:
        contents: identifies its contents.
        size: in bytes.
        step, number, lineage: as in its header; without meaning for another run's checkpoint.
        part: the name of the part of the model that it has; "": all of it.
    """

    path: str
    contents: str
    size: int
    step: int = 0
    number: int = 0
    lineage: tuple[Ancestor, ...] = ()
    part: str = ""


@dataclass(frozen=True, kw_only=True)
class EpochTotals:
    """Totals of the CSV log after an epoch."""

    epoch: int
    totals: Totals


@dataclass(frozen=True, kw_only=True)
class FolderRecord(JsonRecord):
    """What one machine's run folder has.

    Attributes:
        number: the number that a first generation of a start would get there.
        count: the number of checkpoint files, usable or not.
        files: those of which this run may resume, by their headers.
        indexes: of checkpoints in parts.
        origin: the file that `--resume` names, if it is there; one or none.
        known: the recorded lineages; one or none.
        notes: sentences on what is skipped.
        totals: of the CSV log.
    """

    number: int
    count: int
    files: tuple[FoundFile, ...] = ()
    indexes: tuple[CheckpointIndex, ...] = ()
    origin: tuple[FoundFile, ...] = ()
    known: tuple[NumberedLineage, ...] = ()
    notes: tuple[str, ...] = ()
    totals: tuple[EpochTotals, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Checkpoint from which the run may resume.

    Attributes:
        name: the file, for messages.
        file: the file, as the first machine that has it describes it.
        header: what decides about it; None for another run's.
        paths: the path of the file on each machine that has it.
        parts: the files of the parts, by name, of which `file` is one; {}: it is no part.
    """

    name: str
    file: FoundFile
    header: CheckpointHeader | None = None
    paths: Mapping[int, Path] = field(default_factory=dict)
    parts: Mapping[str, Candidate] = field(default_factory=dict)


def first_of_machine(group: Group) -> bool:
    """Return whether this rank is the first one of its machine, which looks into its folder."""
    machines = [member.machine for member in group.generation.members]
    return machines.index(group.machine) == group.rank


def record_group(folder: Path, group: Group) -> None:
    """Record a generation's number and lineage in the run's folder, as first rank of a machine."""
    if first_of_machine(group):
        record_generation(folder, group.generation.number)
        record_lineage(folder, group.generation.number, group.generation.lineage)


def look_into(
    folder: Path, output: OutputConfig, identity: Mapping[str, object], *, clean: bool = True
) -> FolderRecord:
    """Look into a machine's run folder; make it.

    Args:
        folder: the run's.
        output: says what to resume from.
        identity: flags that make it this run; another run's checkpoints are skipped.
        clean: remove what a killed writer left half done; nothing is written there now.

    Raises:
        PacelineError: the folder can't be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(folder, output.keep_checkpoints)
    if clean:
        checkpoints.clean()
    in_parts = "mesh" in identity or identity.get("stages", 1) != 1  # of a script; of the command
    paths = checkpoints.parts() if in_parts else checkpoints.newest_first()
    indexes = tuple(CheckpointIndex.of_folder(checkpoints.folder)) if in_parts else ()
    recorded = recorded_lineage(folder)
    notes: list[str] = []
    files = _files(paths, identity, notes)
    origin = Path(output.resume)
    named = output.resume not in ("auto", "no") and origin.is_file()
    return FolderRecord(
        number=next_generation(folder),
        count=len(indexes) if in_parts else len(paths),
        files=tuple(files),
        indexes=indexes,
        origin=(_found(origin),) if named and not paths else (),
        known=()
        if recorded is None
        else (NumberedLineage(number=recorded[0], lineage=recorded[1]),),
        notes=tuple(notes),
        totals=tuple(
            EpochTotals(epoch=epoch, totals=totals) for epoch, totals in read_totals(folder).items()
        ),
    )


def gather_records(run: Run, own: FolderRecord | None) -> dict[int, FolderRecord]:
    """Return the record of each machine, by its number; collective.

    Args:
        run: connects the ranks.
        own: what this rank found, as the first one of its machine; else None.
    """
    data = own.to_text().encode() if own is not None else b""
    context = run.context
    gathered = gather_bytes(context.group("all", "steps"), data, "the search for checkpoints")
    machine_of = context.world.generation.machine_of
    return {
        machine_of(rank): FolderRecord.from_text(text) for rank, text in enumerate(gathered) if text
    }


def candidates(
    records: Mapping[int, FolderRecord], generation: Generation
) -> tuple[list[Candidate], list[str]]:
    """Return the checkpoints from which the run may resume, the newest first, and notes.

    Args:
        records: of each machine.
        generation: names the machines.

    Raises:
        CheckpointError: two lineages committed steps.
    """
    found = _candidates(records, generation)
    headers = {each.header: each for each in found if each.header is not None}
    valid = newest_valid(headers, known_lineages(records))
    void = [
        f"{each.name}: a later generation started before its step {each.file.step:,}: it is void."
        for header, each in headers.items()
        if header not in valid
    ]
    # Ranks remove the parts of old checkpoints before rank 0 removes an index.
    newest = max((each.file.step for each in found), default=-1)
    torn = [
        f"step-{index.step:08}.json: a part of this checkpoint is missing or damaged."
        for record in records.values()
        for index in record.indexes
        if index.step > newest
    ]
    return [headers[header] for header in valid], [*_notes(records, generation), *void, *torn]


def candidate_of_step(
    records: Mapping[int, FolderRecord], generation: Generation
) -> Candidate | None:
    """Return a checkpoint of the state from which a generation starts; None if there is none.

    Args:
        records: of each machine.
        generation: names the machines, and has the lineage to which the checkpoint belongs.
    """
    for each in _candidates(records, generation):
        file = each.file
        ids = [ancestor.id for ancestor in file.lineage[-1:]]
        if file.step == generation.start and all(
            is_in_lineage(Held(generation=id, token="", step=file.step), generation) for id in ids
        ):
            return each
    return None


def _candidates(records: Mapping[int, FolderRecord], generation: Generation) -> Sequence[Candidate]:
    """Return all checkpoints of the run, each with its file on each machine; rank 0's first."""
    first = generation.machine_of(0)
    found: dict[str, Candidate] = {}
    for machine in sorted(records, key=lambda machine: (machine != first, machine)):
        for file in records[machine].files:
            known = found.get(file.contents)
            if known is None:
                name = file.path + _place(machine, generation)
                header = CheckpointHeader(
                    path=Path(name), step=file.step, number=file.number, lineage=file.lineage
                )
                known = Candidate(name=name, file=file, header=header)
            paths = {**known.paths, machine: Path(file.path)}
            found[file.contents] = replace(known, paths=paths)
    indexes = [index for record in records.values() for index in record.indexes]
    whole = [each for each in found.values() if not each.file.part]
    return [*whole, *(each for index in indexes for each in _joined(index, found.values()))]


def _joined(index: CheckpointIndex, found: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the checkpoint of an index, if all its parts are there."""
    parts = {
        each.file.part: each
        for each in found
        if each.file.step == index.step
        and [one.id for one in each.file.lineage[-1:]] == [index.generation]
    }
    if all(part in parts for part in index.parts):
        first = parts[index.parts[0]]
        name = first.name.replace(f".{first.file.part}.pt", ".json")
        yield replace(first, name=name, parts={part: parts[part] for part in index.parts})


def known_lineages(records: Mapping[int, FolderRecord]) -> list[NumberedLineage]:
    """Return the lineages that the machines have recorded."""
    return [known for record in records.values() for known in record.known]


def totals_before(records: Mapping[int, FolderRecord], epoch: int) -> Totals | None:
    """Return the log's totals of the epochs before one, by the machine that has most of them."""
    found = [
        each.totals for record in records.values() for each in record.totals if each.epoch < epoch
    ]
    return max(found, key=lambda totals: totals.batches, default=None)


def _notes(records: Mapping[int, FolderRecord], generation: Generation) -> list[str]:
    """Return the notes of all machines, each once; a machine without rank 0 is named."""
    first = generation.machine_of(0)
    notes = list(records[first].notes)
    for machine, record in records.items():
        own = [note for note in record.notes if note not in records[first].notes]
        notes += [f"On {_machine(machine, generation)}: {note}" for note in own]
    return notes


def _place(machine: int, generation: Generation) -> str:
    own = machine == generation.machine_of(0)
    return "" if own else f" on {_machine(machine, generation)}"


def _machine(machine: int, generation: Generation) -> str:
    host = next(member.host for member in generation.members if member.machine == machine)
    return f"machine {machine} ({host})"


def _files(
    paths: Sequence[Path], identity: Mapping[str, object], notes: list[str]
) -> Iterable[FoundFile]:
    """Read the headers of a run's checkpoints; note why others are skipped."""
    for path in paths:
        try:
            state = read_checkpoint(path, peek=True)
            if difference(state.get("config") or {}, identity):
                notes.append(f"{path}: this checkpoint belongs to another run and is skipped.")
                continue
            header = CheckpointHeader.of_state(path, state)
        except CheckpointError as error:
            notes.append(str(error))
            continue
        yield replace(
            _found(path),
            step=header.step,
            number=header.number,
            lineage=header.lineage,
            part=state.get("part", ""),
        )


def _found(path: Path) -> FoundFile:
    return FoundFile(path=str(path), contents=contents_id(path), size=path.stat().st_size)
