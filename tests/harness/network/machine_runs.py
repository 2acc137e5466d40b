"""Runs of `paceline train` on machines of a switch, each with a folder of its own.

No worker trains step `HOLD` before the file `released` exists: what a test does after `reach` and
before `release` is always in the middle of the run, also on a busy machine.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from torch import Tensor, nn

from paceline.cluster.environment import WORKER_VARIABLE
from paceline.observe.event_file import find_event_files, read_events
from paceline.observe.ledger import Proof, prove
from tests.harness.library import held_script
from tests.harness.network.switched_machines import Switch
from tests.harness.processes.command import Result
from tests.harness.processes.fork_server import ServedPopen, environment_of
from tests.harness.processes.run_folders import wait_until, wait_until_step

ROOT = Path(__file__).parents[3]
HOLD, STEPS, EPOCHS, BATCH = 16, 6, 5, 12  # an epoch's last batch is short
LIMIT = 120.0
_WORDS = (
    *("train", "--train_data", "null", "--test_data", "null", "--epoch_size", "70"),
    *("--test_epoch_size", "12", "--image_size", "8", "--augment", "none", "--num_labels", "3"),
    *("--base_learning_rate", "0.01", "--warmup_epochs", "0", "--num_epochs", str(EPOCHS)),
    *("--model", f"{__name__}:held", "--run_id", "r", "--decode_workers", "0"),
)


class HeldNet(nn.Module):
    """A net in float64 without batch statistics, which waits for the test."""

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, num_labels)).double()
        self.trained = 0

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self.trained <= HOLD:
            self.trained += 1
            if self.trained > HOLD:
                wait_until(Path("../released").exists, LIMIT)
        return self.body(images.double())


def held(num_labels: int) -> nn.Module:
    """Make the net, for `--model`."""
    return HeldNet(num_labels)


class MachineRun:
    """A run on the machines of a switch.

    Args:
        folder: the folders of the machines are in it.
        switch: the switch.
        words: further words of the command, among them the rendezvous.
        workers: for each machine, its number of workers.
        peer_timeout: seconds without a heartbeat after which a member is suspected.
        output: the folder of runs, seen from a machine's.
        script: run `held_script.py` under `paceline launch`, in place of `paceline train`.
    """

    def __init__(
        self,
        folder: Path,
        switch: Switch,
        *words: str,
        workers: Sequence[int],
        peer_timeout: float,
        output: str = "runs",
        script: bool = False,
    ) -> None:
        self._output = output
        self._script: tuple[str, ...] = ()
        self.folder, self.switch, self._workers = folder, switch, workers
        shards, batch = str(len(workers)), str(BATCH // len(workers))
        self._words = (*_WORDS, "--num_shards", shards, "--batch_size", batch, *words)
        self._words += ("--peer_timeout", str(peer_timeout), "--output_dir", output)
        if script:
            self._words = ("launch", "--num_shards", shards, "--run_id", "r", *words)
            self._script = ("--", sys.executable, "-m", held_script.__name__, str(peer_timeout))
        self._commands = [self._start(machine) for machine in range(len(workers))]

    def run_folder(self, machine: int) -> Path:
        """Return the run's folder on a machine."""
        return self.folder / str(machine) / self._output / "r"

    def reach(self, step: int) -> None:
        """Wait until rank 0 has completed a step."""
        wait_until_step(self.run_folder(0), step, generation=0, limit=LIMIT)

    def processes(self, machine: int, *, supervised: bool = False) -> list[psutil.Process]:
        """Return the processes of a machine; only its workers, if `supervised`."""
        found = self.switch.processes(machine)
        if supervised:
            return [process for process in found if WORKER_VARIABLE in environment_of(process)]
        return found

    def kill(self, machine: int) -> None:
        """Kill all processes of a machine; some end by themselves once others are killed."""
        for process in self.processes(machine):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def stand_still(self) -> None:
        """Wait until no machine has recorded anything for a while."""
        quiet_s, last, since = 0.5, -1, time.monotonic()

        def is_quiet() -> bool:
            nonlocal last, since
            written = [path.stat().st_size for path in self.folder.rglob("events.*.jsonl")]
            if sum(written) != last:
                last, since = sum(written), time.monotonic()
            return time.monotonic() - since > quiet_s

        wait_until(is_quiet, LIMIT)

    def release(self) -> None:
        """Let the workers train the steps from `HOLD` on."""
        (self.folder / "released").touch()

    def wait(self, machine: int) -> Result:
        """Wait for the end of a machine's supervisor and its workers."""
        command = self._commands[machine]
        text, _ = command.communicate(timeout=LIMIT)
        return Result(command.returncode, text)

    def again(self) -> list[Result]:
        """Start the same command again on all machines; wait for its end."""
        self.release()
        self._commands = [self._start(machine) for machine in range(len(self._workers))]
        return [self.wait(machine) for machine in range(len(self._workers))]

    def end(self) -> None:
        """End what runs."""
        for command in self._commands:
            command.kill()
            command.wait()
            if command.stdout is not None:
                command.stdout.close()

    def checkpoints(self, machine: int) -> set[str]:
        """Return the names of the checkpoints on a machine."""
        return {path.name for path in (self.run_folder(machine) / "checkpoints").glob("step-*.pt")}

    def contents(self, machine: int) -> Mapping[str, tuple[bytes, int]]:
        """Return the contents and the times of all files in a machine's run folder, by path."""
        return {
            str(path): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in self.run_folder(machine).rglob("*")
            if path.is_file()
        }

    def proof(self, *machines: int) -> Proof:
        """Read the ledger of some machines' files."""
        files = find_event_files(*(self.run_folder(machine) for machine in machines))
        return prove((member, read_events(path)) for member, path in files)

    def _start(self, machine: int) -> subprocess.Popen[str]:
        here = self.folder / str(machine)
        here.mkdir(exist_ok=True)
        own = ["--shard_id", str(machine), "--num_workers", str(self._workers[machine])]
        python = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", sys.executable]
        command = [*python, "-m", "paceline.cli.main", *self._words, *own, *self._script]
        return ServedPopen(
            self.switch.machines[machine].inside(*command),
            cwd=here,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
