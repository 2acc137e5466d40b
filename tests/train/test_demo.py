"""`make demo`: from real images to held-out accuracy; torch alone reads what it leaves."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.harness.processes.command import Running, rows_of, run

EXAMPLES = Path(__file__).parents[2] / "examples"


def program(name: str, folder: Path) -> str:
    """Run an example; return what it printed."""
    ended = Running([sys.executable, str(EXAMPLES / name)], folder=folder, variables={}).wait(280)
    assert ended.status == 0, ended.text
    return ended.text


@pytest.mark.timeout(300)  # the demo's own limit, on a machine with other work
def test_the_demo_reaches_95_per_cent_on_held_out_images(tmp_path: Path) -> None:
    program("demo.py", tmp_path)
    (run_folder,) = (tmp_path / "runs").iterdir()
    rows = rows_of(run_folder)
    assert float(rows[-1]["test_accuracy"]) >= 0.95

    # Twenty lines that import torch alone get the accuracy that the log has.
    reader = (EXAMPLES / "read_checkpoint.py").read_text().splitlines()
    assert sum(bool(line) and line[0] not in '#"' for line in reader) <= 20
    assert [line for line in reader if "import" in line] == [
        "import torch",
        "from torch.nn.functional import batch_norm, conv2d, pad, relu",
    ]
    flags = ("--db_type", "minidb", "--encoding", "raw", "--format", "tensorprotos")
    made = run("db", "create", "demo-data/test", "test-minidb", *flags, folder=tmp_path)
    assert made.status == 0, made.text
    shutil.copy(run_folder / "checkpoints" / "best.pt", tmp_path / "checkpoint.pt")
    best = max((row["test_accuracy"] for row in rows), key=float)
    assert program("read_checkpoint.py", tmp_path).strip() == best
