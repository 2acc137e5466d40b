"""A run that went on twice from the same state: a start that finds both lineages is refused."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

from tests.harness.processes import fault_runs
from tests.harness.processes.command import Command, run
from tests.harness.processes.fault_runs import BATCH, TASK
from tests.harness.processes.run_folders import wait_until_step

WORDS = (
    *("train", *TASK, "--model", f"{fault_runs.__name__}:unobserved", "--run_id", "r"),
    *("--batch_size", str(BATCH), "--num_epochs", "100000"),
)
RUN = Path("runs", "r")


def train_until(folder: Path, step: int, generation: int) -> Path:
    """Start the run, and stop it once it has completed a step; return its newest checkpoint."""
    command = Command(*WORDS, folder=folder)
    wait_until_step(folder / RUN, step, generation)
    command.send(signal.SIGTERM)
    ended = command.wait()
    assert " is saved in runs/r" in ended.text, ended.text
    return max((folder / RUN / "checkpoints").glob("step-*.pt"))


def contents(folder: Path) -> Mapping[str, tuple[bytes, int]]:
    """Return the contents and the times of all files below a folder."""
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_start_that_finds_two_lineages_which_both_committed_steps_writes_nothing(
    tmp_path: Path,
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    train_until(one, 0, generation=0)
    shutil.copytree(one, other)
    own = train_until(one, 0, generation=1)
    newer = train_until(other, int(own.stem[5:]), generation=1)
    shutil.copy(newer, own.parent)
    before = contents(one)
    refused = run(*WORDS, folder=one)
    assert refused.status == 1, refused.text
    (line,) = [line for line in refused.text.splitlines() if "lineages" in line]
    for path in (own, newer):
        assert re.search(
            rf"{path.name} \(generation 1, id \w+, {int(path.stem[5:])} steps\) ", line
        )
    assert line.endswith(
        "are of two lineages of the run, which both committed steps, and neither contains the "
        "other: remove the checkpoints of one of them, or give another --run_id."
    )
    assert "Traceback" not in refused.text
    assert contents(one) == before
