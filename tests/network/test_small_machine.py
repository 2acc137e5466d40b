"""A container's limits: /dev/shm of 1 MB, and 256 open files a process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.harness.data.databases import key, write_lmdb
from tests.harness.data.image_folder import file_of, ramp
from tests.harness.data.record_bytes import encoded_tensorprotos
from tests.harness.processes.command import Running

ROOT = Path(__file__).parents[2]
LIMITS = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && ulimit -n 256 && exec "$@"'
TRAIN = (
    *("train", "--train_data", "data", "--model", "resnet20", "--image_size", "64"),
    *("--scale", "72", "--num_labels", "10", "--batch_size", "64", "--num_epochs", "1"),
    *("--num_workers", "1", "--decode_workers", "3", "--use_cpu", "--run_id", "r"),
)


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
def test_decode_processes_need_no_shared_memory_file_system(tmp_path: Path) -> None:
    files = [file_of(ramp(80, 90, seed=i), "JPEG") for i in range(8)]
    values = [(key(i), encoded_tensorprotos(files[i % 8], i % 10)) for i in range(256)]
    write_lmdb(tmp_path / "data", values)
    program = (sys.executable, "-m", "paceline.cli.main", *TRAIN)
    command = ("unshare", "--mount", "sh", "-c", LIMITS, "sh", *program)
    run = Running(command, folder=tmp_path, variables={"PYTHONPATH": str(ROOT)})
    result = run.wait()
    assert result.status == 0, result.text
    assert "Finished" in result.text
