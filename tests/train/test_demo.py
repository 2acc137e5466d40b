"""`make demo`: from real images to held-out accuracy with two workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.harness.command import rows_of

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_the_demo_reaches_95_per_cent_on_held_out_images(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, DEMO], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (run_folder,) = (tmp_path / "runs").iterdir()
    assert float(rows_of(run_folder)[-1]["test_accuracy"]) >= 0.95
