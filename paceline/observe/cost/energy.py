"""Energy counters: of processors and memory by RAPL, of GPUs by NVML.

RAPL's counters are files in microjoules. They wrap around, within an hour on a busy processor:

    energy_uj   …, 262143000000, 262143900000, 12000, …     max_energy_range_uj  262143328850

See Documentation/power/powercap/powercap.rst of the Linux kernel. A machine that has none, or that
lets only root read them, has no figure: then nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

POWERCAP = Path("/sys/class/powercap")


class Rapl:
    """Energy of this machine's processors and memory since this was made.

    Args:
        folder: the zones of the kernel's power capping.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        # A package contains its cores; memory is beside it. The zone "psys" contains all of them.
        zones = [*sorted(folder.glob("intel-rapl:*"))]
        self._zones = {
            zone: _read(zone / "energy_uj")
            for zone in zones
            if (name := _text(zone / "name")).startswith("package") or name == "dram"
        }
        self._joules = 0.0 if self._zones else math.nan

    def joules(self) -> float:
        """Read the counters, at least twice in the time of a wraparound; NaN if one can't be."""
        for zone, before in self._zones.items():
            now = _read(zone / "energy_uj")
            used = now - before
            if used < 0:
                used += _read(zone / "max_energy_range_uj")
            self._zones[zone] = now
            self._joules += used / 1e6
        return self._joules


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _read(path: Path) -> float:
    text = _text(path)
    return float(text) if text.isdecimal() else math.nan


def gpu_counter(device: torch.device) -> Callable[[], float]:
    """Return what reads the energy of a GPU since now, in joules; NaN where it isn't known.

    It needs the package nvidia-ml-py, and a GPU that counts: NVIDIA's since Volta.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        first: float = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # in mJ
    except Exception:  # no package, no driver, or a GPU without a counter: NVML has many errors
        return lambda: math.nan

    def joules() -> float:
        try:
            now: float = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except pynvml.NVMLError:
            return math.nan
        return (now - first) / 1000

    return joules
