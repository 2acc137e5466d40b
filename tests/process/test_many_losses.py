"""What a survivor has after 30 lost peers is what it had after a few."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.harness.equivalence.memory_growth import Usage
from tests.harness.processes.fork_server import ServedPopen

FEW, MANY, LIMIT = 10, 30, 110
SEVERAL = 5  # generations: objects of an earlier one mostly outlive its end by one generation
ARENAS = 10  # anonymous mappings, by which the C library's heaps vary; one a generation: 20 more
STACKS = 5  # of ended threads, which the C library keeps: 40 MiB at most, 8 MiB each
SYNCS = {
    "allreduce": ("--sync", "allreduce"),
    "sharded": ("--sync", "notified", "--update", "sharded", "--bucket_mb", "0.01"),
}


@pytest.mark.parametrize("sync", SYNCS)
def test_a_survivor_of_30_losses_has_what_it_had_after_a_few(sync: str, tmp_path: Path) -> None:
    module = "tests.harness.membership.replaced_peers"
    command = [sys.executable, "-m", module, str(tmp_path), str(MANY), *SYNCS[sync]]
    with ServedPopen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [line.pop("generation") for line in lines] == list(range(MANY + 1))
    usage = [Usage(**line) for line in lines]
    few, many = usage[FEW - SEVERAL : FEW], usage[-SEVERAL:]
    for name in ("files", "threads", "mapped_files", "shared_memory"):
        # An object may outlive its generation for several ones in a row, in any of them.
        assert least(many, name) <= greatest(usage[:FEW], name), f"{name}: {all_of(usage, name)}"
    assert least(many, "guards") <= least(few, "guards") + STACKS, usage
    assert least(many, "mappings") < least(few, "mappings") + ARENAS, usage
    assert median(each.memory for each in many) < 1.02 * median(each.memory for each in few), usage


def least(usage: list[Usage], name: str) -> int:
    """Return the least of what there was of something in several generations."""
    return min(all_of(usage, name))


def greatest(usage: list[Usage], name: str) -> int:
    """Return the most of what there was of something in several generations."""
    return max(all_of(usage, name))


def all_of(usage: list[Usage], name: str) -> list[int]:
    """Return what there was of something in each of several generations."""
    return [int(getattr(one, name)) for one in usage]
