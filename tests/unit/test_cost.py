"""What a run costs: counters of energy, processor time, and the sum over starts and losses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.observe.cost.cost import Cost
from paceline.observe.cost.cost_meter import Usage, total_usage
from paceline.observe.cost.energy import Rapl
from paceline.observe.cost.processes import processor_seconds, running_seconds

RANGE = 1_000_000_000  # microjoules


def zone(folder: Path, name: str, label: str, microjoules: int) -> Path:
    place = folder / name
    place.mkdir(parents=True)
    (place / "name").write_text(f"{label}\n")
    (place / "max_energy_range_uj").write_text(f"{RANGE}\n")
    (place / "energy_uj").write_text(f"{microjoules}\n")
    return place / "energy_uj"


def test_energy_is_that_of_packages_and_memory_over_a_wraparound(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 999_000_000)
    other = zone(tmp_path, "intel-rapl:1", "package-1", 5)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 7_000_000)
    ignored = [
        zone(tmp_path, "intel-rapl:0:0", "core", 0),
        zone(tmp_path, "intel-rapl:2", "psys", 0),
        zone(tmp_path, "intel-rapl-mmio:0", "package-0", 0),
    ]
    rapl = Rapl(tmp_path)
    for path in ignored:
        path.write_text("900000000")
    package.write_text("4000000\n")  # 1 J up to the range, and 4 J
    memory.write_text("9500000\n")
    assert rapl.joules() == pytest.approx(5 + 2.5)
    other.write_text("2000005\n")
    assert rapl.joules() == pytest.approx(5 + 2.5 + 2)
    assert rapl.joules() == pytest.approx(5 + 2.5 + 2)


def test_nothing_is_guessed_where_a_counter_cannot_be_read(tmp_path: Path) -> None:
    assert str(Rapl(tmp_path / "none").joules()) == "nan"
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    zone(tmp_path, "intel-rapl:1", "package-1", 0)
    rapl = Rapl(tmp_path)
    counter.unlink()
    assert str(rapl.joules()) == "nan"
    known = Usage(processor=3600, machine=1800, processor_energy=3.6e6)
    unknown = Usage(processor=3600, machine=1800, processor_energy=rapl.joules())
    cost = Cost.of_usage(total_usage([known, unknown]), 3.0)
    assert cost == Cost(processor_hours=2, gpu_hours=0, machine_hours=1, price=3)
    assert cost.texts == ["2 processor hours", "price 3.00"]
    alone = Cost.of_usage(total_usage([known, known]), 0)
    assert (alone.processor_kwh, alone.gpu_kwh, alone.price) == (2, None, None)
    assert alone.texts == ["2 processor hours", "2 kWh"]


def test_processor_time_is_that_of_a_process_and_all_that_it_started(tmp_path: Path) -> None:
    """A child waited for, and a grandchild that lives, each with its own measure of its time."""
    burn = "import time\nwhile time.process_time() < {}: pass\n"
    (tmp_path / "burn.py").write_text(burn.format("0.3") + "print(flush=True)\ninput()\n")
    program = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {burn.format('0.2')!r}], check=True)\n"
        f"child = subprocess.Popen([sys.executable, {str(tmp_path / 'burn.py')!r}],\n"
        "    stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(flush=True)\ninput()\nchild.communicate(b'\\n')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        found = processor_seconds(process.pid)
        own = sum(os.times()[:2])
        process.communicate(b"\n")
    assert 0.46 <= found < 10  # of which each part is rounded down to a hundredth
    assert processor_seconds(process.pid) == 0
    assert processor_seconds(os.getpid()) >= own - 0.02
    started = running_seconds(os.getpid())
    assert 0 < started < time.clock_gettime(time.CLOCK_BOOTTIME)
    assert running_seconds(process.pid) == 0
