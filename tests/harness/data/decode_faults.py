"""Faults of decode processes in whole runs of `paceline train`.

    python -m tests.harness.data.decode_faults faults --kills 25 --stops 25 [--seed N]
    python -m tests.harness.data.decode_faults orphans --times 20

`faults` kills and stops decode processes at random moments of one epoch. The losses must have the
bits of an undisturbed run, and the ledger must prove each sample once. `orphans` kills a trainer, a
supervisor and a launcher, and looks for processes that are left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.data.db.write.writers import LmdbWriter
from tests.harness.data.databases import key
from tests.harness.data.image_folder import file_of, ramp
from tests.harness.data.record_bytes import encoded_tensorprotos
from tests.harness.processes.run_folders import events

RECORDS = 30_000
COMMAND = (sys.executable, "-m", "paceline.cli.main")
FLAGS = (
    *("train", "--train_data", "data", "--model", "resnet20", "--image_size", "64"),
    *("--augment", "pad", "--num_labels", "10", "--batch_size", "32", "--num_epochs", "1"),
    *("--num_workers", "1", "--decode_workers", "3", "--use_cpu"),
)


def write_data(folder: Path, records: int) -> None:
    """Write JPEG files that cost their decoder a few milliseconds, so that faults meet it."""
    files = [file_of(ramp(250, 200, seed=i), "JPEG") for i in range(8)]
    (folder / "data").mkdir()
    writer = LmdbWriter(folder / "data")
    for i in range(records):
        writer.put(key(i), encoded_tensorprotos(files[i % 8], i % 10))
    writer.finish()
    writer.close()


def train(folder: Path, run_id: str) -> subprocess.Popen[bytes]:
    log = (folder / f"{run_id}.log").open("wb")
    return subprocess.Popen([*COMMAND, *FLAGS, "--run_id", run_id], cwd=folder, stdout=log)


def decoders(root: int) -> list[psutil.Process]:
    """The decode processes below a process: children of its fork server."""
    found: list[psutil.Process] = []
    try:
        below = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    for each in below:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if "fork_server" in " ".join(each.cmdline()):
                found += [child for child in each.children() if has_not_ended(child)]
    return found


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition, at most so long."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def has_not_ended(process: psutil.Process) -> bool:
    """Whether a process runs; one that has ended may wait for its new parent to ask for it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def losses(folder: Path, run_id: str) -> list[float]:
    return [e["loss"] for e in events(folder / "runs" / run_id, 0) if e["event"] == "loss"]


def faults(kills: int, stops: int, seed: int, records: int = RECORDS) -> str:
    """Disturb a run; return what was wrong, or an empty text."""
    chance = random.Random(seed)
    wanted = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
    chance.shuffle(wanted)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder, records)
        if train(folder, "calm").wait():
            return (folder / "calm.log").read_text()
        disturbed = train(folder, "disturbed")
        done = 0
        for number in wanted:
            present: list[psutil.Process] = []

            def all_run(present: list[psutil.Process] = present) -> bool:
                present[:] = decoders(disturbed.pid)
                return len(present) == 3

            if not until(all_run, 60):
                break  # the run has ended, or an ended process wasn't replaced
            victim = chance.choice(present)
            time.sleep(chance.uniform(0, 0.2))
            with suppress(psutil.NoSuchProcess):  # the run has ended
                victim.send_signal(number)
                done += 1
            if not until(lambda victim=victim: not has_not_ended(victim), 60):  # type: ignore[misc]
                break
        state = (
            f"the last to {victim.pid}; then the decode processes were {decoders(disturbed.pid)}"
        )
        status = disturbed.wait()
        text = (folder / "disturbed.log").read_text()
        if status or done < len(wanted):
            return f"seed {seed}: status {status}, {done} of {len(wanted)} faults, {state}\n{text}"
        if losses(folder, "calm") != losses(folder, "disturbed"):
            return f"seed {seed}: the losses differ"
        ledger = subprocess.run(
            [*COMMAND, "ledger", "runs/disturbed"], cwd=folder, capture_output=True, text=True
        )
        print(ledger.stdout.strip().splitlines()[-1])
        return ledger.stdout if ledger.returncode else ""


def orphans(times: int) -> str:
    """Kill a trainer and a supervisor; return what was left, or an empty text."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder, 600)
        for number in range(times):
            for role in ("trainer", "supervisor"):
                run = train(folder, f"{role}{number}")
                if not until(lambda run=run: len(decoders(run.pid)) == 3, 60):  # type: ignore[misc]
                    return (folder / f"{role}{number}.log").read_text()
                started = psutil.Process(run.pid).children(recursive=True)
                trainer = next(p for p in started if "paceline.cli.main" in p.cmdline())
                below = [trainer, *trainer.children(recursive=True)]
                (trainer if role == "trainer" else psutil.Process(run.pid)).kill()
                begun = time.monotonic()
                limit = 2 if role == "trainer" else 60  # workers continue without a supervisor
                _, left = psutil.wait_procs(below, timeout=limit)
                run.wait(60)
                left = [process for process in left if has_not_ended(process)]
                if left:
                    return f"{role} {number}: {left} after {time.monotonic() - begun:.1f} s"
            print(f"{number + 1} of {times}", flush=True)
    return ""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    disturb = commands.add_parser("faults")
    disturb.add_argument("--kills", type=int, default=25)
    disturb.add_argument("--stops", type=int, default=25)
    disturb.add_argument("--seed", type=int, default=random.randrange(10**6))
    orphan = commands.add_parser("orphans")
    orphan.add_argument("--times", type=int, default=20)
    given = parser.parse_args(argv)
    if given.command == "faults":
        wrong = faults(given.kills, given.stops, given.seed)
    else:
        wrong = orphans(given.times)
    print(wrong or "all as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.getcwd()
    sys.exit(main(sys.argv[1:]))
