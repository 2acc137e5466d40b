"""The table of the benchmark of bucket sizes."""

from __future__ import annotations

import pytest

from tests.harness.documents.benchmark_runs import RATIO, load, table


def test_the_default_is_compared_with_each_size_and_with_ddps_best(
    capsys: pytest.CaptureFixture[str],
) -> None:
    milliseconds = {
        "ddp:1": [120.0, 240.0],
        "ddp:25": [150.0, 300.0],
        "notified:4": [110.0, 220.0],
        "notified:16": [100.0, 200.0],
    }
    load("buckets").print_sizes(milliseconds, "notified:4", markdown=True)
    rows = table(capsys.readouterr().out)
    ratios = {row: RATIO.findall(cells[1])[0].split()[0] for row, cells in rows.items()}
    assert ratios == {
        "ddp:1": "0.917",
        "ddp:25": "0.733",
        "notified:4": "1.000",
        "notified:16": "1.100",
    }
    assert [cells[2].split()[0] for cells in rows.values()] == ["1.00", "0.80", "1.09", "1.20"]
    assert [cells[3] for cells in rows.values()] == ["", "", "default", "best"]
