"""A data-loading process that dies while the script computes ends the script with a sentence."""

from __future__ import annotations

from pathlib import Path

from tests.harness.processes.launcher_commands import Script

SCRIPT = """
import signal
import threading

import psutil
import torch
from torch.utils.data import TensorDataset

import paceline

world = paceline.join()
loader = paceline.loader(TensorDataset(torch.zeros(8, 1)), 2, world, train=False, num_workers=1)
for _ in loader:
    data_processes = [p for p in psutil.Process().children() if p.status() != "zombie"]
    data_processes[-1].send_signal(signal.SIGKILL)
    threading.Event().wait(30)  # torch's signal handler raises here
"""


def test_a_data_loading_process_that_dies_outside_the_loader_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = Script("paceline", "script.py", folder=tmp_path, real=True, ranks=1).wait()
    assert ended.status == 1, ended.text
    assert "a process that loads data died (out of memory?)" in ended.text
    assert "Traceback" not in ended.text
