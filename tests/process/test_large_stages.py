"""A model that is too large for one process's memory trains in two stages, each in so much."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness.library.large_stages import WEIGHTS
from tests.harness.processes.command import Result
from tests.harness.processes.launcher_commands import run
from tests.harness.processes.memory_groups import memory_group

LIMIT = 360 * 2**20  # a stage takes 262 MiB, all of the model in one process 450 to 490


def train(stages: int, folder: Path) -> tuple[Result, list[int]]:
    """Train in so many processes; return how they ended, and their peaks, in bytes."""
    with memory_group("0") as first, memory_group("1") as second:
        groups = [first, second][:stages]
        for group in groups:
            group.limit(LIMIT)
        folders = [str(group.folder) for group in groups]
        script = ("-m", "tests.harness.library.large_stages")
        ended = run("paceline", *script, str(stages), *folders, folder=folder, ranks=stages)
        return ended, [group.peak for group in groups]


def test_two_stages_train_where_one_process_runs_out_of_memory(tmp_path: Path) -> None:
    whole, peaks = train(1, tmp_path)
    assert whole.status == 1, whole.text
    assert "rank 0 on machine 0" in whole.text
    assert "SIGKILL" in whole.text
    assert peaks[0] > 0.98 * LIMIT
    ended, peaks = train(2, tmp_path)
    assert ended.status == 0, ended.text
    found = [json.loads(line) for line in ended.text.splitlines() if line.startswith("{")]
    assert sorted(one["stage"] for one in found) == [0, 1]
    for one in sorted(found, key=lambda one: one["stage"]):
        print({name: f"{size / 2**20:.0f} MiB" for name, size in one.items() if name != "stage"})
        assert one["with values"] < 0.75 * WEIGHTS  # of which a stage has half
    assert max(peaks) < LIMIT
