"""The benchmark of `paceline predict` runs small, and relates it to its parts and to a script."""

from __future__ import annotations

from pathlib import Path

from tests.harness.data.image_folder import some_images
from tests.harness.documents.benchmark_runs import LIMIT, benchmark


def test_predictions_beside_their_parts_and_a_script(tmp_path: Path) -> None:
    some_images(tmp_path / "images", classes=2, each=40, size=32)
    words = (str(tmp_path / "images"), "--images", "80", "--rounds", "1")
    with benchmark("predict.py", *words) as process:
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, out + err
    lines = out.strip().splitlines()
    rates = {line.split()[0]: line.split() for line in lines[1:6]}
    assert [*rates] == ["decode", "model", "predict", "command", "script"]
    assert all(float(words[1].replace(",", "")) > 0 for words in rates.values())
    assert lines[6].startswith("predict / bound")
    assert lines[7].startswith("command / script")
    assert lines[8].startswith("processor, command")
    assert lines[9].startswith("processor, script")
    assert lines[10].endswith("of its processor time")
    assert "MiB at the end" in lines[11]
