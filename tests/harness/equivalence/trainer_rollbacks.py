"""The trainer with contexts that end in mid-step: all ranks, threads of this process, go back.

Ranks train real records over Gloo, TCP and shared memory, with the recorders of `paceline train`.
In each generation but the last every rank breaks off at a moment of its own, or loses a peer.
"""

from __future__ import annotations

import csv
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from paceline import wiring
from paceline.cli.flags import parse
from paceline.cluster.membership.generation import Group
from paceline.comm.communicator import Communicator
from paceline.config.train import TrainConfig
from paceline.errors import CommError
from paceline.models.zoo import build_model
from paceline.replica.live_hooks import patch
from paceline.run.step_snapshots import OwnPart
from paceline.run.steps import Successor
from paceline.state.snapshots import SnapshotName
from paceline.state.weights import save_weights
from paceline.trainer import Trainer
from tests.harness.data.databases import write_minidb
from tests.harness.data.record_bytes import bgr_planes, raw_datum
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.rollbacks import meet
from tests.harness.processes.worlds import world_of

STEPS, EPOCHS, BATCH, SAMPLES = 4, 2, 12, 40  # the last batch is short
MOMENTS = ("load", "forward", "backward", "update", "end", "evaluation")
FLAGS = (
    *(
        "--db_type",
        "minidb",
        "--use_cpu",
        "--model",
        "resnet20",
        "--image_size",
        "16",
        "--augment",
        "none",
    ),
    *("--augment", "none", "--num_labels", "10", "--num_epochs", str(EPOCHS), "--timeout", "10"),
    *("--base_learning_rate", "0.05", "--decode_threads", "1", "--warmup_epochs", "0"),
)
Moment = tuple[int, str]  # a step's number, and when in it


@dataclass
class TrainerRollbacks:
    """A training by the trainer, and what all its ranks share.

    Attributes:
        folder: the run's.
        flags: flags of `paceline train`, besides `FLAGS`.
        machines: the number of ranks on each machine.
        moments: for each generation but the last, for each rank: when it breaks off.
        parked: the ranks of the first generation that aren't in the second one.
        starts: the steps from which generations went on.
    """

    folder: Path
    flags: Sequence[str]
    machines: tuple[int, ...]
    moments: Sequence[Sequence[Moment]] = ()
    parked: tuple[int, ...] = ()
    starts: list[int] = field(default_factory=list)
    _parts: list[OwnPart] = field(default_factory=list)
    _held: dict[int, tuple[SnapshotName, ...]] = field(default_factory=dict)
    _store: HashStore = field(default_factory=HashStore)

    def run(self) -> list[Mapping[str, Tensor]]:
        """Train; return each rank's weights."""
        data = self.folder / "data"
        self.folder.mkdir()
        _write_images(data)
        torch.manual_seed(1)  # here: the ranks' threads have one generator
        start = build_model("resnet20", num_labels=10, num_channels=3)
        save_weights(self.folder / "start.pt", start)
        config = self._config(str(data))
        return run_ranks(sum(self.machines), lambda c: self._train(c, config))

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows of the CSV log."""
        (log,) = self.folder.glob("*.log")
        lines = log.read_text().splitlines()
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))

    def _config(self, data: str) -> TrainConfig:
        given = ["--train_data", data, "--test_data", data, *FLAGS, *self.flags]
        given += ["--load_model_path", str(self.folder / "start.pt")]
        given += ["--batch_size", str(BATCH // len(self.machines))]
        given += ["--num_shards", str(len(self.machines)), "--run_id", self.folder.name]
        given += ["--output_dir", str(self.folder.parent), "--master", "127.0.0.1:1"]
        return parse(TrainConfig, given, prog="paceline train", description="")

    def _train(self, c: Communicator, config: TrainConfig) -> Mapping[str, Tensor]:
        device, group = torch.device("cpu"), self._group(c, 0)
        numbers = iter(range(1, 99))

        def next_generation(error: CommError, held: Sequence[SnapshotName]) -> Successor:
            self._held[c.rank] = tuple(held)
            meet(c)
            of_all = set.intersection(*(set(self._held[rank]) for rank in range(c.world_size)))
            meet(c)
            name = max(of_all, key=lambda name: name.step)
            if c.rank == 0:
                self.starts.append(name.step)
            number, parked = next(numbers), self.parked
            if c.rank in parked:
                assert trainer.steps._snapshots is not None
                self._parts.append(trainer.steps._snapshots.restore(name)[1])
            meet(c)
            if c.rank in parked:
                raise Parked
            parts = self._parts if c.rank == 0 else []
            return Successor(group=self._group(c, number, parked), start=name, parts=parts)

        with ExitStack() as stack:
            sources = wiring.open_sources(config)
            stack.callback(sources.close)
            run = stack.enter_context(wiring.make_run(config, group, self._store, device))
            start = wiring.Start()
            run.recorder, log = wiring.build_recorder(config, group, self.folder, start)
            stack.callback(run.recorder.close)
            trainer = wiring.build_trainer(
                config,
                run,
                sources,
                device,
                self.folder,
                start,
                next_generation=next_generation,
            )
            for part in (trainer.replica, trainer.train, trainer.test):
                assert part is not None
                stack.callback(part.close)
            trainer.steps.record_start(
                None,
                model="resnet20",
                device="cpu",
                samples=trainer.train.samples,
                steps=trainer.train.steps,
                epochs=trainer.epochs,
                batch=config.global_batch,
                log=log,
            )
            Breaks(trainer, [moments[c.rank] for moments in self.moments])
            with suppress(Parked):
                trainer.run()
                trainer.replica.drain()
            run.recorder.event("end", generation=trainer.steps.generation)
        return trainer.model.state_dict()

    def _group(self, c: Communicator, number: int, parked: Collection[int] = ()) -> Group:
        """Return the group of a generation, whose ranks are those that aren't parked."""
        group = world_of(self.machines, c.rank, token=f"token {number}", number=number)
        members = enumerate(group.generation.members)
        left = [(rank, member) for rank, member in members if rank not in parked]
        places = Counter[int]()
        for rank, member in left:
            left[left.index((rank, member))] = (
                rank,
                replace(member, local_rank=places[member.machine]),
            )
            places[member.machine] += 1
        generation = replace(group.generation, members=tuple(member for _, member in left))
        return Group.world(generation, [rank for rank, _ in left].index(c.rank))


class Parked(Exception):
    """Exception that ends the training of a member that isn't in the next generation."""


class Breaks:
    """Breaks in a trainer's loop: one moment for each generation but the last."""

    def __init__(self, trainer: Trainer, moments: Sequence[Moment]) -> None:
        self._trainer, self._moments = trainer, moments
        self._before(trainer.train, "batch", "load")
        self._before(trainer.precision, "backward_and_update", "backward")
        self._after(trainer.precision, "backward_and_update", "end")
        self._before(trainer.optimizer, "zero_grad", "update")
        trainer.model.register_forward_pre_hook(self._forward)

    def pass_by(self, name: str) -> None:
        """Break off here, if this is the present generation's moment."""
        steps = self._trainer.steps
        moment = dict(enumerate(self._moments)).get(steps.generation)
        if moment == (steps.position.number, name):
            raise CommError(f"broken off in step {steps.position.number}: {name}")

    def _forward(self, *_: object) -> None:
        self.pass_by("forward" if self._trainer.model.training else "evaluation")

    def _before(self, target: object, method: str, name: str) -> None:
        plain: Callable[..., Any] = getattr(target, method)

        def broken(_: object, *args: Any, **kwargs: Any) -> Any:
            self.pass_by(name)
            return plain(*args, **kwargs)

        patch(target, method, broken)

    def _after(self, target: object, method: str, name: str) -> None:
        plain: Callable[..., Any] = getattr(target, method)

        def broken(_: object, *args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            self.pass_by(name)
            return result

        patch(target, method, broken)


def drawn(seed: int, firsts: Sequence[int], ranks: int) -> list[list[Moment]]:
    """Draw for each generation, of each rank, a moment in one of two steps."""
    draw = random.Random(seed)
    return [
        [(first + draw.randrange(2), draw.choice(MOMENTS[:-1])) for _ in range(ranks)]
        for first in firsts
    ]


def _write_images(folder: Path) -> None:
    draw = np.random.default_rng(3)
    items = []
    for number in range(SAMPLES):
        pixels = draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        items.append((f"{number:08}".encode(), raw_datum(bgr_planes(pixels), number % 10)))
    write_minidb(folder, items)
