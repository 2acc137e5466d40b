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
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from paceline.cluster.environment import WORKER_VARIABLE, WorkerEnvironment
from paceline.observe.event_file import find_event_files, read_events
from paceline.observe.ledger import Proof, prove
from tests.harness.processes.command import Command, Result
from tests.harness.processes.fork_server import environment_of
from tests.harness.processes.run_folders import events, wait_until, wait_until_step

WORKERS = 3
FIRST_KILL, LAST_KILL, STEPS, EPOCHS = 8, 20, 6, 5  # steps; of an epoch, the last batch is short
EPOCH_SIZE, BATCH = 70, 12  # samples
LIMIT = 90.0
_WORDS = (
    *("train", "--train_data", "null", "--test_data", "null", "--epoch_size", str(EPOCH_SIZE)),
    *("--test_epoch_size", "12", "--image_size", "16", "--augment", "none", "--num_labels", "3"),
    *("--batch_size", str(BATCH), "--base_learning_rate", "0.01", "--warmup_epochs", "0"),
    *("--model", f"{__name__}:observed", "--run_id", "r", "--decode_threads", "1"),
)


class ObservedNet(nn.Module):
    """A net in float64 without batch statistics, which waits for the kill and saves its weights."""

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(8 * 7 * 7, 16),
            nn.Tanh(),
            nn.Linear(16, num_labels),
        ).double()
        self.trained = 0

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            torch.save(self.state_dict(), weights_file(Path(), os.getpid()))
        elif self.trained <= LAST_KILL:
            self.trained += 1
            if self.trained > LAST_KILL:
                wait_until(Path("killed").exists, LIMIT)
        return self.body(images.double())


def observed(num_labels: int) -> nn.Module:
    """Make the net, for `--model`."""
    return ObservedNet(num_labels)


def weights_file(folder: Path, pid: int) -> Path:
    """Return the file in which a process saves its weights."""
    return folder / f"weights.{pid}.pt"


class FaultRun:
    """A run of three workers on one machine, in the middle of which processes are killed.

    Args:
        folder: where it runs; its run folder is `runs/r`.
        words: further words of the command.
        workers: the number of workers.
        epochs: the number of epochs.

    Attributes:
        folder: where it runs.
        count: the number of workers.
        pids: by local rank, the processes of the workers, once `reach` has returned.
    """

    def __init__(
        self, folder: Path, *words: str, workers: int = WORKERS, epochs: int = EPOCHS
    ) -> None:
        self.folder = folder
        self._words = (*_WORDS, "--num_workers", str(workers), "--num_epochs", str(epochs), *words)
        self.count = workers
        self._command = Command(*self._words, folder=folder)
        self.pids: dict[int, int] = {}

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / "r"

    def reach(self, step: int) -> None:
        """Wait until rank 0 has completed a step, and find the workers."""
        wait_until_step(self.run_folder, step, generation=0, limit=LIMIT)
        for process in self._command.family():
            variables = environment_of(process)
            worker = WorkerEnvironment.from_text(variables[WORKER_VARIABLE])
            self.pids[worker.local_rank] = process.pid
        assert sorted(self.pids) == list(range(self.count))

    def reach_checkpoint(self) -> None:
        """Wait until rank 0 has recorded a checkpoint."""

        def recorded() -> bool:
            return any(event["event"] == "checkpoint" for event in events(self.run_folder, 0))

        wait_until(recorded, LIMIT)

    def kill(self, *local_ranks: int) -> None:
        """Kill workers at once: none of them makes a step after the loss of another."""
        victims = [psutil.Process(self.pids[local_rank]) for local_rank in local_ranks]
        for victim in victims:
            victim.suspend()
        for victim in victims:
            victim.kill()

    def kill_supervisor(self) -> None:
        """Kill the supervisor alone."""
        self._command.send(signal.SIGKILL)

    def release(self) -> None:
        """Let the workers leave step `LAST_KILL`: no kill follows."""
        (self.folder / "killed").touch()

    def wait(self) -> Result:
        """Wait for the end of the supervisor and of all workers."""
        return self._command.wait(LIMIT)

    def again(self) -> Result:
        """Start the same command again; wait for its end."""
        return Command(*self._words, folder=self.folder).wait(LIMIT)

    def workers(self) -> list[psutil.Process]:
        """Return the processes of the workers."""
        return [psutil.Process(pid) for pid in self.pids.values()]

    def weights_of(self, local_rank: int) -> Mapping[str, Tensor]:
        """Return the weights that a worker's process had in its last evaluation."""
        return load(weights_file(self.folder, self.pids[local_rank]))

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights that the run has left."""
        return load(self.run_folder / "observed_model.pt")

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


def load(path: Path) -> Mapping[str, Tensor]:
    """Read saved weights."""
    weights: Mapping[str, Tensor] = torch.load(path, weights_only=True)
    return weights


def proof_of(run_folder: Path) -> Proof:
    """Read a run's ledger."""
    return prove((member, read_events(path)) for member, path in find_event_files(run_folder))


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the largest difference between two sets of weights."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)
