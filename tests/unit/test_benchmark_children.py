"""What a benchmark has started ends with it, in whatever session it is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.documents.benchmark_runs import BENCHMARKS

SCRIPT = f"""
import sys
sys.path.append({str(BENCHMARKS)!r})
import subprocess
from command_line import run_script

TREE = "setsid sleep 1000 & echo begun; wait"
run_script(lambda: subprocess.run(["bash", "-c", TREE]).returncode)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_benchmark_leaves_no_process(number: int, status: int, tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "bench.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        process.communicate(timeout=60)  # returns when no process has this output open any more
    assert process.returncode == status
