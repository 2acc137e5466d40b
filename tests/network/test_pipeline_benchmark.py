"""The benchmark of pipelines has all rows, in its table and in its file."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness.documents.benchmark_runs import INTERVAL, SAME, need_shaped_links, printed, table

SMALL = ("--batch", "4", "--microbatches", "2", "--image_size", "32", "--rates", "1gbit")


def test_a_pipeline_stands_beside_torch_s_and_its_bound(tmp_path: Path) -> None:
    need_shaped_links()
    file = tmp_path / "found.json"
    rows = ("--schedules", "1f1b", "--torch", "torch-gpipe", "--markdown", "--json", str(file))
    cells = table(printed("pipeline.py", "--quick", *SMALL, *rows))
    assert list(cells) == ["torch-gpipe", "1f1b"]
    assert cells["torch-gpipe"][1:] == [SAME, "", ""]
    _, speed, bound, reached = cells["1f1b"]
    assert INTERVAL.fullmatch(speed)
    assert bound.isdecimal()
    assert INTERVAL.fullmatch(reached)
    assert [row["row"] for row in json.loads(file.read_text())] == ["torch-gpipe", "1f1b"]
