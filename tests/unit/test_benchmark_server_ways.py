"""The benchmarks of exchanges with servers: limits in turn, what a log says, and histograms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.harness.documents.benchmark_runs import load

rates = load("server_rates")
ways = load("server_ways")


class Turns:
    """An event that is set after some waits; notes which groups are limited during each."""

    def __init__(self, groups: list[Path], waits: int) -> None:
        self.groups = groups
        self.left = waits
        self.limited: list[list[int]] = []

    def is_set(self) -> bool:
        return self.left == 0

    def wait(self, seconds: float) -> None:
        quotas = [(group / "cpu.max").read_text().split()[0] for group in self.groups]
        self.limited.append([n for n, quota in enumerate(quotas) if quota != "max"])
        self.left -= 1


def test_one_worker_after_another_is_limited_and_none_in_the_end(tmp_path: Path) -> None:
    groups = [tmp_path / str(number) for number in range(3)]
    for group in groups:
        group.mkdir()
        (group / "cpu.max").write_text("max 5000")
    ended = Turns(groups, 4)
    rates.in_turn(1.0, groups, ended)
    assert ended.limited == [[0], [1], [2], [0]]
    assert {(group / "cpu.max").read_text().split()[0] for group in groups} == {"max"}


def test_steps_of_the_measured_time_count_and_a_line_that_is_being_written_does_not(
    tmp_path: Path,
) -> None:
    log = tmp_path / "0"
    lines = [json.dumps({"time": time, "images": 32 * time}) for time in range(6)]
    log.write_text("\n".join([*lines, '{"time": 3.5, "im']))
    assert [step["time"] for step in rates._steps(log, 1.5, 4.5)] == [2, 3, 4]
    assert [step["time"] for step in rates._steps(log, 3.5)] == [4, 5]


def test_a_histogram_is_in_percent_of_all_reads() -> None:
    assert ways.histogram({"0": 1, "2": 2, "10": 1}) == "0: 25%, 2: 50%, 10: 25%"


def test_the_reason_of_a_failure_is_the_line_with_the_error() -> None:
    text = "paceline: joined.\npaceline: error: no servers.\npaceline: ended.\n"
    assert ways.reason_in(text) == "paceline: error: no servers."
    assert ways.reason_in("one\n\ntwo\n") == "two"


@pytest.mark.parametrize(
    ("way", "servers"),
    [
        ("allreduce", 0),
        ("average:every=16", 0),
        ("average:every=16,through=server", 1),
        ("server:staleness=2", 1),
        ("server measured", 1),
    ],
)
def test_a_server_is_started_where_a_way_needs_one(way: str, servers: int) -> None:
    assert ("--num_servers" in ways.launch_command(3, way)) == bool(servers)


def test_a_plot_has_a_bar_for_each_staleness_in_its_proportion() -> None:
    found: dict[str, Any] = {
        "always": {"none": {"staleness": {}}, "server": {"staleness": {"0": 3, "1": 1, "2": 0}}}
    }
    histograms = rates._histograms(found)
    assert histograms == {"server, always": {"0": 75.0, "1": 25.0}}
    drawn = ElementTree.fromstring(load("shares_plot").bars(histograms, "versions", "%"))
    _, *bars = drawn.findall("{http://www.w3.org/2000/svg}rect")
    tall, low = (float(bar.attrib["height"]) for bar in bars)
    assert tall == pytest.approx(3 * low, rel=0.01)
