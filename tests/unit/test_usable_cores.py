"""A process uses as many cores as its affinity and its cgroups' CPU limits allow."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from paceline.data.decoding.usable_cores import cpu_limit, usable_cores


@pytest.mark.parametrize(
    ("files", "groups", "cores"),
    [
        ({}, "0::/", math.inf),
        ({"cpu.max": "max 100000\n"}, "0::/", math.inf),
        ({"cpu.max": "150000 100000\n"}, "0::/in/a/container", 1.5),
        ({"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "max 100000\n"}, "0::/a/b", 4.0),
        ({"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "300000 100000\n"}, "0::/a/b", 1.0),
        ({"other/cpu.max": "100000 100000\n"}, "0::/a", math.inf),
        (
            {"cpu/a/cpu.cfs_quota_us": "250000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            "4:memory:/z\n3:cpu,cpuacct:/a\n0::/\n",
            2.5,
        ),
        (
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            "3:cpu:/\n",
            math.inf,
        ),
        ({"cpu.max": "nonsense"}, "0::/", math.inf),
    ],
)
def test_the_least_limit_of_a_group_and_those_around_it_holds(
    tmp_path: Path, files: dict[str, str], groups: str, cores: float
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_limit(groups, tmp_path) == cores


def test_this_process_has_a_core() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
