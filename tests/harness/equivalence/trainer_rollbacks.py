"""The trainer with contexts that end in mid-step: all ranks, threads of this process, go back.

Ranks train real records over Gloo, TCP and shared memory, with the recorders of `paceline train`.
In each generation but the last every rank breaks off at a moment of its own, or loses a peer. A
member that isn't in the next generation hands over what it alone has, and waits:

    generation 0    members 0, 1 | 2
    generation 1    members 0 | 2       member 1 has handed over its part of the start snapshot
    generation 2    members 0, 1 | 2    member 1 gets a copy of the start snapshot, without a part

With `backups`, a member that isn't in the next generation is lost: its backup holder has its part.
Where all copies of a part are lost, the others go back to the newest checkpoint.
"""

from __future__ import annotations

import csv
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional as F

from paceline.cli.flags import parse
from paceline.cluster.membership.backup_holder import holder_of
from paceline.cluster.membership.generation import Ancestor, Group
from paceline.cluster.membership.protocol import Successor
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.comm.communicator import Communicator
from paceline.config.train import TrainConfig
from paceline.errors import CommError
from paceline.models.zoo import build_model
from paceline.replica.live_hooks import patch
from paceline.session.command_trainer import build_trainer
from paceline.session.connect import connect_run
from paceline.session.recorders import record_training
from paceline.session.sources import open_sources
from paceline.session.stage_checks import in_stages
from paceline.snapshots.own_part import OwnPart
from paceline.snapshots.step_snapshots import StepSnapshots
from paceline.state.checkpoint_files import FOLDER
from paceline.state.checkpoint_writer import CheckpointWriter
from paceline.state.weights import save_weights
from tests.harness.data.databases import write_minidb
from tests.harness.data.record_bytes import bgr_planes, raw_datum
from tests.harness.equivalence.backup_members import BackupMembers
from tests.harness.equivalence.handed_snapshots import hold, state_of_all
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.rollbacks import meet
from tests.harness.equivalence.trainer_breaks import Breaks, Moment
from tests.harness.membership.given_membership import GivenMembership
from tests.harness.membership.missing_parts import missing_parts
from tests.harness.processes.sessions import session_of
from tests.harness.processes.worlds import world_of

STEPS, EPOCHS, BATCH, SAMPLES = 4, 2, 12, 40  # the last batch is short
_LIMIT = 60.0  # seconds
FLAGS = (
    *("--db_type", "minidb", "--use_cpu", "--model", f"{__name__}:normed"),
    *("--image_size", "16"),
    *("--augment", "none", "--num_labels", "10", "--num_epochs", str(EPOCHS), "--timeout", "10"),
    *("--base_learning_rate", "0.05", "--decode_workers", "0", "--warmup_epochs", "0"),
)
_IMAGES = "those of the run's folder"  # unless other flags name data
FLOAT32, FLOAT64 = ("--model", f"{__name__}:single"), ("--model", f"{__name__}:double")


class Normed(nn.Module):
    """Net with what a ResNet has: batch statistics, a shortcut, and several buckets of 0.1 MB."""

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64))
        self.block = nn.Sequential(
            *(nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64)),
        )
        self.shortcut = nn.Conv2d(64, 64, 1, stride=2)
        self.head = nn.Linear(64, num_labels)

    def forward(self, images: Tensor) -> Tensor:
        found = F.relu(self.stem(images))
        found = F.relu(self.block(found) + self.shortcut(found))
        scores: Tensor = self.head(found.mean((2, 3)))
        return scores


def normed(num_labels: int) -> nn.Module:
    """Make a small net with batch statistics, for `--model`."""
    return Normed(num_labels)


def single(num_labels: int) -> nn.Module:
    """Make a net without batch statistics, for `--model`."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8 * 7 * 7, 16),
        nn.Tanh(),
        nn.Linear(16, num_labels),
    )


def double(num_labels: int) -> nn.Module:
    """Make the same in float64."""
    return nn.Sequential(ToFloat64(), single(num_labels).double())


class ToFloat64(nn.Module):
    """Layer that converts images to float64."""

    def forward(self, images: Tensor) -> Tensor:
        return images.double()


@dataclass
class TrainerRollbacks:
    """A training by the trainer, and what all its ranks share.

    Attributes:
        folder: the run's.
        flags: flags of `paceline train`, besides `FLAGS`.
        machines: the number of members on each machine.
        moments: for each generation but the last, for each member: when it breaks off.
        parked: for each generation but the first, the members that aren't in it; by default none.
        backups: the members' backups; None: a member that isn't in the next generation hands over
            its part.
        restored: for each lost member, its own part of a start, and the copy that replaces it.
        apart: whether each machine has a run folder of its own, `folder_of`.
        announced: given a checkpoint file, returns whether the members learn of it.
        from_disk: for each generation but the first, whether it went on from a checkpoint or the
            beginning.
        recorded: the numbers of further generations that were recorded in run folders.
        to_holders: whether a member hands over its part to its backup holder, not to the first one;
            where that one leaves, too, to the holder's holder.
        together: whether no member breaks off before all present ones have come to their moment.
        starts: the steps from which generations went on.
        handed_over: for each of them, the members that got a copy of the start snapshot.
    """

    folder: Path
    flags: Sequence[str]
    machines: tuple[int, ...]
    moments: Sequence[Sequence[Moment]] = ()
    parked: Sequence[Collection[int]] = ()
    backups: BackupMembers | None = None
    apart: bool = False
    announced: Callable[[Path], bool] = lambda path: True
    from_disk: list[bool] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    to_holders: bool = False
    together: bool = False
    starts: list[int] = field(default_factory=list)
    handed_over: list[list[int]] = field(default_factory=list)
    restored: list[tuple[OwnPart, OwnPart]] = field(default_factory=list)
    _parts: defaultdict[tuple[int, int], list[OwnPart]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _snapshots: dict[int, StepSnapshots] = field(default_factory=dict)
    _held: dict[int, tuple[SnapshotName, ...]] = field(default_factory=dict)
    _durable: set[int] = field(default_factory=lambda: {0})  # steps of announced checkpoints
    _writers: dict[int, CheckpointWriter | None] = field(default_factory=dict)
    _meetings: dict[int, threading.Barrier] = field(default_factory=dict)
    _store: HashStore = field(default_factory=HashStore)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> list[Mapping[str, Tensor]]:
        """Train; return each rank's weights."""
        data = self.folder / "data"
        self.folder.mkdir()
        _write_images(data)
        torch.manual_seed(1)  # here: the ranks' threads have one generator
        config = self._config(str(data))
        labels = config.data.num_labels
        start = build_model(config.model.name, num_labels=labels, num_channels=3)
        save_weights(self.folder / "start.pt", start)
        return run_ranks(sum(self.machines), lambda c: self._train(c, config))

    def folder_of(self, machine: int) -> Path:
        """Return the run folder of a machine."""
        return self.folder / f"machine{machine}" if self.apart else self.folder

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows of the CSV log."""
        (log,) = self.folder.glob("*.log")
        lines = log.read_text().splitlines()
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))

    def _config(self, data: str) -> TrainConfig:
        config = _parsed(tuple(self.flags), len(self.machines)).with_run_id(self.folder.name)
        if config.data.train_data == _IMAGES:
            config = replace(config, data=replace(config.data, train_data=data, test_data=data))
        return replace(
            config,
            model=replace(config.model, load_model_path=str(self.folder / "start.pt")),
            output=replace(config.output, output_dir=str(self.folder.parent)),
        )

    def _train(self, c: Communicator, config: TrainConfig) -> Mapping[str, Tensor]:
        device = torch.device("cpu")
        group = in_stages(self._group(c, 0), config.pipeline.stages)
        folder = self.folder_of(group.machine)
        numbers = iter(range(1, 99))  # of the next generations
        starts: list[bool] = []  # whether they are from snapshots
        parts: list[OwnPart] = []  # of members that aren't in the next one

        def next_generation(error: CommError) -> Successor:
            number = next(numbers)
            if self.backups is not None:
                successor = self._recover(c, self.backups, number)
                starts.append(successor.start is not None)
                return successor
            starts.append(True)
            self._held[c.rank] = self._snapshots[c.rank].held
            start = self._agree(c, number)
            while c.rank in self._parked(number):
                if number == len(self.moments):
                    raise Parked
                number = next(numbers)
                self._held.pop(c.rank, None)
                start = self._agree(c, number)
            parts[:] = self._parts[number, c.rank]
            return Successor(group=self._group(c, number), start=start)

        with ExitStack() as stack:
            sources = open_sources(config)
            stack.callback(sources.close)
            limits = (config.world.first_iter_timeout, config.world.timeout)
            membership = GivenMembership(self._store, next_generation=next_generation)
            if self.backups is not None:
                self.backups.announced = self._announce
                membership = self.backups.enter(
                    group.member.id, self._store, next_generation=next_generation
                )
            run = stack.enter_context(connect_run(group, self._store, device, limits, membership))
            session = session_of(config, run, folder, stack)
            record_training(config, session)
            trainer = build_trainer(config, session, sources)
            commits = trainer.steps._snapshots.commits
            if self.backups is None:  # what is held is acknowledged; parts are handed over
                commits._backup = None
                patch(commits, "backup_parts", lambda *_: parts)
            else:
                backup = commits._backup
                assert backup is not None
                self.backups.backups[group.member.id] = backup
                self.backups.records[group.member.id].backup = backup
            durable = trainer.steps.recovery._durable

            def record(_: object, group: Group) -> None:
                # Before its ranks connect, unless it must be restored from a disk first.
                entered = run.context.world.generation.number == group.generation.number
                assert entered == (not starts[-1])
                self.recorded.add(group.generation.number)

            patch(durable, "record", record)
            trainer.steps.recovery.record_start(
                None,
                model="normed",
                device="cpu",
                samples=trainer.train.samples,
                steps=trainer.train.steps,
                epochs=trainer.epochs,
                batch=config.global_batch,
            )
            self._snapshots[c.rank] = trainer.steps._snapshots
            self._writers[c.rank] = trainer.steps._writer
            Breaks(trainer, [moments[c.rank] for moments in self.moments], self._await_others)
            with suppress(Parked):
                trainer.run()
                trainer.replica.drain()
            run.recorder.event("end", generation=trainer.steps.generation)
        return trainer.evaluated.state_dict()

    def _await_others(self, generation: int) -> None:
        """Return once all present members have come to their moments, if they break off together.

        One that broke off sooner would end what another one still needs to come there.
        """
        if self.together:
            present = sum(self.machines) - len(self._parked(generation))
            with self._lock:
                meeting = self._meetings.setdefault(generation, threading.Barrier(present))
            meeting.wait(_LIMIT)

    def _agree(self, c: Communicator, number: int) -> SnapshotName:
        """Return the snapshot from which a generation continues; all members call it.

        Members that leave hand over their parts, and members that come back get copies.
        """
        was_in, is_in = (c.rank not in self._parked(each) for each in (number - 1, number))
        own = self._snapshots[c.rank]
        meet(c)
        start = max(
            set.intersection(*(set(held) for held in self._held.values())),
            key=lambda name: name.step,
        )
        meet(c)
        if c.rank == 0:
            self.starts.append(start.step)
            self.handed_over.append([])
        if was_in and not is_in:
            self._parts[number, self._taker(c, number)].append(own.restore(start)[1])
        meet(c)
        if is_in and not was_in and start not in own.held:
            self.handed_over[-1].append(c.rank)
            hold(own, start, state_of_all(self._snapshots[self._present(number - 1)[0]], start))
        meet(c)
        return start

    def _recover(self, c: Communicator, backups: BackupMembers, number: int) -> Successor:
        """Return the next generation, which the members enter that aren't lost.

        It starts from the newest snapshot that all of them hold, with all parts.
        """
        own, member = self._snapshots[c.rank].commits, f"start-{c.rank}"
        if (writer := self._writers[c.rank]) is not None:
            writer.wait()
        if backups.prompt:
            backups.backups[member].close()  # it has sent everything
            meet(c)
        backups.records[member].promise()
        meet(c)
        lost = {f"start-{rank}" for rank in self._parked(number)}
        held = [record.held for each, record in backups.records.items() if each not in lost]
        start = max(
            (
                name
                for name in set.intersection(*(set(one) for one in held))
                if any(one[name].complete for one in held)
                or not missing_parts(held[0][name].whole, [one[name].parts for one in held])
            ),
            key=lambda name: name.step,
            default=None,
        )
        with self._lock:
            for rank in self._parked(number) if start and member not in lost else ():
                for copied in own.backup_parts(start, [f"start-{rank}"]):
                    self.restored.append((self._snapshots[rank].commits.own_part(start), copied))
        if c.rank == 0:
            self.starts.append(max(self._durable) if start is None else start.step)
            self.from_disk.append(start is None)
        meet(c)
        if member in lost:
            backups.lost.add(member)
            if number < len(self.moments):
                self._recover(c, backups, number + 1)  # the other ranks meet this one there
            raise Parked
        backups.records[member].promised = False
        return Successor(group=self._group(c, number), start=start)

    def _announce(self, body: Mapping[str, Any]) -> None:
        if self.announced(self.folder_of(0) / FOLDER / body["file"]):
            self._durable.add(body["step"])

    def _taker(self, c: Communicator, number: int) -> int:
        """Return the member that gets the part of one that leaves."""
        present = self._present(number)
        if not self.to_holders:
            return present[0]
        group, before = self._group(c, number - 1), self._present(number - 1)
        holder = holder_of(group.generation, group.rank)
        while holder is not None and before[holder] not in present:
            holder = holder_of(group.generation, holder)
        assert holder is not None
        return before[holder]

    def _present(self, number: int) -> list[int]:
        """Return the members that are in a generation."""
        return [one for one in range(sum(self.machines)) if one not in self._parked(number)]

    def _parked(self, number: int) -> Collection[int]:
        """Return the members that aren't in a generation."""
        return self.parked[number - 1] if 0 < number <= len(self.parked) else ()

    def _group(self, c: Communicator, number: int) -> Group:
        """Return the group of a generation, whose ranks are those that aren't parked."""
        group = world_of(self.machines, c.rank, token=f"token {number}", number=number)
        numbers, places = [], Counter[int]()
        members = []
        for rank, member in enumerate(group.generation.members):
            if rank not in self._parked(number):
                numbers.append(rank)
                members.append(replace(member, local_rank=places[member.machine]))
                places[member.machine] += 1
        generation = replace(
            group.generation,
            members=tuple(members),
            ancestors=tuple(
                Ancestor(id=world_of(token=f"token {each}").generation.id, start=start)
                for each, start in enumerate([0, *self.starts][:number])
            ),
            start=[0, *self.starts][number],
        )
        return Group.world(generation, numbers.index(c.rank))


@cache
def _parsed(flags: tuple[str, ...], machines: int) -> TrainConfig:
    """Parse flags, of which dozens of trainings differ in their folders alone."""
    given = ["--train_data", _IMAGES, "--test_data", _IMAGES, *FLAGS, *flags]
    given += ["--batch_size", str(BATCH // machines), "--num_shards", str(machines)]
    given += ["--master", "127.0.0.1:1", "--run_id", "run"]
    return parse(TrainConfig, given, prog="paceline train", description="")


class Parked(Exception):
    """Exception that ends the training of a member that isn't in the next generation."""


def _write_images(folder: Path) -> None:
    draw = np.random.default_rng(3)
    items = []
    for number in range(SAMPLES):
        pixels = draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        items.append((f"{number:08}".encode(), raw_datum(bgr_planes(pixels), number % 10)))
    write_minidb(folder, items)
