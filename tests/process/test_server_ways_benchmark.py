"""The benchmark of exchanges trains by each, and leaves out those refused, with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests.harness.documents.benchmark_runs import printed, table


def write_images(folder: Path) -> None:
    """Write four images of each of two classes."""
    random = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(4):
            pixels = random.integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def test_a_way_has_accuracy_time_and_staleness_and_one_that_is_refused_its_reason(
    tmp_path: Path,
) -> None:
    write_images(tmp_path / "train")
    write_images(tmp_path / "test")
    out = printed(
        *("server_ways.py", str(tmp_path / "train"), str(tmp_path / "test"), "--workers", "2"),
        *("--ways", "server:staleness=1", "server:stale=1", "--seeds", "1", "--epochs", "2"),
        *("--batch", "4", "--results", str(tmp_path / "results"), "--markdown"),
    )
    cells = table(out)
    assert list(cells) == ["server:staleness=1"]
    accuracy, by_seed, _, _, staleness = cells["server:staleness=1"]
    assert accuracy == by_seed
    assert 0 <= float(accuracy) <= 100
    assert staleness.startswith("0: ")
    assert "server:stale=1: left out: paceline: " in out
    assert "must be an option, given once" in out
    (kept,) = (tmp_path / "results").iterdir()
    assert json.loads(kept.read_text())["images"] == 16
