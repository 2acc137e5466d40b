"""Runs of `paceline train` with killed processes, and a net that shows what each process computes.

The test kills once the event files show a step. No worker leaves step `LAST_KILL` before the file
`killed` exists: the kill is always in the middle of the run, also on a busy machine. Each worker
saves its weights with every evaluation, in a file named by its process id. So the files of the last
epoch tell which processes trained to the end, and whether their weights are equal.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from paceline.cluster.environment import WORKER_VARIABLE, WorkerEnvironment
from paceline.observe.event_file import find_event_files, read_events
from paceline.observe.ledger import Proof, prove
from tests.harness.processes.command import Command, Result
from tests.harness.processes.fork_server import environment_of
from tests.harness.processes.run_folders import events, wait_until, wait_until_step

SINGLE = ("--model", f"{__name__}:single")
WORKERS = 3
EPOCH_SIZE, BATCH = 70, 12  # samples
FIRST_KILL, LAST_KILL, STEPS, EPOCHS = 8, 20, 6, 5  # steps; of an epoch, the last batch is short
LIMIT = 90.0
EXACT = 1e-10  # of the weights of float64, where sums have another order
TASK = (
    *("--train_data", "null", "--test_data", "null", "--epoch_size", str(EPOCH_SIZE)),
    *("--test_epoch_size", "12", "--image_size", "16", "--augment", "none", "--num_labels", "3"),
    *("--base_learning_rate", "0.01", "--warmup_epochs", "0", "--seed", "1"),
    *("--decode_workers", "0"),
)
"""Flags of what is trained, besides the batch and the numbers of workers and epochs."""

_WORDS = ("train", *TASK, "--model", f"{__name__}:observed", "--run_id", "r")


class FaultNet(nn.Module):
    """A net without batch statistics."""

    def __init__(self, num_labels: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.dtype = dtype
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(8 * 7 * 7, 16),
            nn.Tanh(),
            nn.Linear(16, num_labels),
        ).to(dtype)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.body(images.to(self.dtype))
        return logits


class ObservedNet(FaultNet):
    """The same net, which waits for the kill and saves its weights."""

    def __init__(self, num_labels: int, dtype: torch.dtype) -> None:
        super().__init__(num_labels, dtype)
        torch.set_num_threads(1)  # bits don't depend on the number of workers of a machine
        self.trained = 0

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            torch.save(self.state_dict(), weights_file(Path(), os.getpid()))
        elif self.trained <= LAST_KILL:
            self.trained += 1
            if self.trained > LAST_KILL:
                wait_until(Path("killed").exists, LIMIT)
        return super().forward(images)


def observed(num_labels: int) -> nn.Module:
    """Make the net in float64, for `--model`."""
    return ObservedNet(num_labels, torch.float64)


def single(num_labels: int) -> nn.Module:
    """Make the net in float32, whose gradients lossy wires encode."""
    return ObservedNet(num_labels, torch.float32)


def unobserved(num_labels: int) -> nn.Module:
    """Make the same net for threads of a test."""
    return FaultNet(num_labels)


def unobserved_single(num_labels: int) -> nn.Module:
    """Make the same net in float32 for threads of a test."""
    return FaultNet(num_labels, torch.float32)


def weights_file(folder: Path, pid: int) -> Path:
    """Return the file in which a process saves its weights."""
    return folder / f"weights.{pid}.pt"


@dataclass(frozen=True)
class Change:
    """Change of a run's generation.

    Attributes:
        start: the step from which the run continued.
        left: ranks of the first generation whose members aren't in the next one.
    """

    start: int
    left: tuple[int, ...]


class FaultRun:
    """A run on machines of this host, in the middle of which processes are killed.

    Args:
        folder: where it runs; its run folder is `runs/r`.
        words: further words of the command, among them the rendezvous of several machines.
        machines: the number of workers of each machine; the machines divide the batch equally.
        epochs: the number of epochs.

    Attributes:
        folder: where it runs.
        count: the number of workers.
        pids: by rank of the first generation, the processes of the workers, once `reach` has
            returned.
    """

    def __init__(
        self,
        folder: Path,
        *words: str,
        machines: tuple[int, ...] = (WORKERS,),
        epochs: int = EPOCHS,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.count = folder, sum(machines)
        self._machines = machines
        batch, shards = str(BATCH // len(machines)), str(len(machines))
        given = ("--batch_size", batch, "--num_shards", shards, "--num_epochs", str(epochs))
        self._words = (*_WORDS, *given, *words)
        self._commands = self._start()
        self.pids: dict[int, int] = {}
        self._servers: list[psutil.Process] = []

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / "r"

    def reach(self, step: int) -> None:
        """Wait until rank 0 has completed a step in the first generation, and find the workers."""
        wait_until_step(self.run_folder, step, generation=0, limit=LIMIT)
        if self.pids:
            return
        for command in self._commands:
            for process in command.family():
                variables = environment_of(process)
                worker = WorkerEnvironment.from_text(variables[WORKER_VARIABLE])
                first = sum(self._machines[: worker.machine])
                if worker.local_rank >= self._machines[worker.machine]:  # they follow the workers'
                    self._servers.append(process)
                else:
                    self.pids[first + worker.local_rank] = process.pid
        assert sorted(self.pids) == list(range(self.count))

    def reach_checkpoint(self) -> None:
        """Wait until rank 0 has recorded a checkpoint."""

        def recorded() -> bool:
            return any(event["event"] == "checkpoint" for event in events(self.run_folder, 0))

        wait_until(recorded, LIMIT)

    def kill(self, *ranks: int) -> None:
        """Kill workers at once: none of them makes a step after the loss of another."""
        victims = [psutil.Process(self.pids[rank]) for rank in ranks]
        for victim in victims:
            victim.suspend()
        for victim in victims:
            victim.kill()

    def kill_supervisor(self, machine: int = 0) -> None:
        """Kill a machine's supervisor alone."""
        self._commands[machine].send(signal.SIGKILL)

    def interrupt(self, machine: int = 0) -> None:
        """Send a machine's supervisor what Ctrl-C does."""
        self._commands[machine].send(signal.SIGINT)

    def release(self) -> None:
        """Let the workers leave step `LAST_KILL`: no kill follows."""
        (self.folder / "killed").touch()

    def wait(self) -> Result:
        """Wait for the end of machine 0's supervisor and its workers."""
        return self.wait_all()[0]

    def wait_all(self) -> list[Result]:
        """Wait for the end of all machines' supervisors and workers."""
        return [command.wait(LIMIT) for command in self._commands]

    def again(self) -> Result:
        """Start the same command again; wait for its end."""
        self._commands = self._start()
        return self.wait()

    def workers(self) -> list[psutil.Process]:
        """Return the processes of the workers."""
        return [psutil.Process(pid) for pid in self.pids.values()]

    def servers(self) -> list[psutil.Process]:
        """Return the servers, if the run has any, once `reach` has returned."""
        return self._servers

    def starts(self) -> list[int]:
        """Return the steps from which the generations after the first one continued."""
        return [event["start"] for event in self._generations()[1:]]

    def changes(self) -> list[Change]:
        """Return the changes of the generation, without those from which no step counts."""
        first, *later = self._generations()
        found: list[Change] = []
        for event in later:
            while found and found[-1].start >= event["start"]:
                found.pop()
            members = enumerate(first["members"])
            left = tuple(rank for rank, member in members if member not in event["members"])
            found.append(Change(event["start"], left))
        return found

    def checkpoint(self, step: int) -> Path:
        """Return the checkpoint of a step."""
        return self.run_folder / "checkpoints" / f"step-{step:08}.pt"

    def weights_of(self, rank: int) -> Mapping[str, Tensor]:
        """Return the weights that a worker's process had in its last evaluation."""
        return load(weights_file(self.folder, self.pids[rank]))

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights that the run has left."""
        (path,) = self.run_folder.glob("*_model.pt")
        return load(path)

    def evaluated(self) -> set[int]:
        """Return the processes that evaluated at least once."""
        return {int(path.name.split(".")[1]) for path in self.folder.glob("weights.*.pt")}

    def completed(self) -> list[int]:
        """Return the ranks of the first generation whose members trained to the end."""
        return [
            rank
            for rank in range(self.count)
            if any(event["event"] == "end" for event in events(self.run_folder, rank))
        ]

    def _generations(self) -> list[dict[str, Any]]:
        """Return the start of each generation, as one of its members has recorded it."""
        found = {
            event["generation"]: event
            for rank in range(self.count)
            for event in events(self.run_folder, rank)
            if event["event"] == "run"
        }
        return [found[number] for number in sorted(found)]

    def _start(self) -> list[Command]:
        return [
            Command(
                *(*self._words, "--num_workers", str(workers), "--shard_id", str(machine)),
                folder=self.folder,
            )
            for machine, workers in enumerate(self._machines)
        ]


def load(path: Path) -> Mapping[str, Tensor]:
    """Read saved weights."""
    weights: Mapping[str, Tensor] = torch.load(path, weights_only=True)
    return weights


def proof_of(run_folder: Path) -> Proof:
    """Read a run's ledger."""
    return prove((member, read_events(path)) for member, path in find_event_files(run_folder))


def requires_exact(run: FaultRun) -> None:
    """Require that the run's files prove that each sample was trained once, in all epochs."""
    proof = proof_of(run.run_folder)
    assert proof.exact, proof.faults
    assert proof.done == proof.extent.steps * proof.extent.epochs


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the largest difference between two sets of weights."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)
