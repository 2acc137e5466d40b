"""The cores that this process may use: by its affinity, and by the CPU limit of its cgroups.

    version 2    0::/a/b              /sys/fs/cgroup/a/b/cpu.max              "150000 100000": 1.5
    version 1    3:cpu,cpuacct:/a/b   /sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us and cpu.cfs_period_us

A limit of a group holds for the groups in it. In a container the process's own group may be mounted
at the root. https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return how many cores this process may use, at least 1; a part of one counts as one."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError):
        limit = cpu_limit(_GROUPS.read_text(), _ROOT)
        return max(1, min(cores, math.ceil(limit))) if limit < math.inf else cores
    return cores


def cpu_limit(groups: str, root: Path) -> float:
    """Return the cores' worth of CPU time that a process may use; infinity without a limit.

    Args:
        groups: the text of its `/proc/PID/cgroup`.
        root: where cgroups are mounted.
    """
    limits = [math.inf]
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            folder = root / ("cpu" if controllers else "") / str(group).lstrip("/")
            with suppress(OSError, ValueError):
                limits += _limits_of(folder)
    return min(limits)


def _limits_of(folder: Path) -> Iterator[float]:
    maximum = folder / "cpu.max"
    if maximum.is_file():
        quota, period = maximum.read_text().split()
    else:
        quota = (folder / "cpu.cfs_quota_us").read_text().strip()
        period = (folder / "cpu.cfs_period_us").read_text()
    if quota not in ("max", "-1"):
        yield int(quota) / int(period)
