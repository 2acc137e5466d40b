"""The benchmark for GPUs on a CPU: each section gives its rows, and what fails is a row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.documents.benchmark_runs import LIMIT, benchmark, load


def test_all_sections_run_small_and_every_loop_is_exact(tmp_path: Path) -> None:
    with benchmark("gpu.py", "--device", "cpu", "--json", str(tmp_path / "gpu.json")) as process:
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, out + err
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["device"] == "cpu"
    assert report["torch"] == torch.__version__
    sections = {name: section["rows"] for name, section in report["sections"].items()}
    assert [len(rows) for rows in sections.values()] == [10, 4, 3, 5, 3]
    for row in (row for rows in sections.values() for row in rows):
        assert not row["error"]
        assert row["name"] in out
    assert list(sections) == ["correctness", "waits", "step", "input", "decode"]
    assert all(row["correct"] for row in sections["correctness"])
    assert all("not measured" in row["measured"] for row in sections["waits"])
    for name in ("step", "input", "decode"):
        measured = [row for row in sections[name] if "not measured" not in row["measured"]]
        assert all(row["value"] > 0 for row in measured)
        ratios = [row["ratio"] for row in measured if row["peer"]]
        assert len(ratios) >= 1
        assert all(0 < ratio["low"] <= ratio["median"] <= ratio["high"] for ratio in ratios)


def test_a_section_that_fails_is_a_row_and_the_status_1_while_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu, rows = load("gpu"), load("gpu_rows")

    def broken(setting: Any) -> Iterator[Any]:
        yield rows.Row(name="first", measured="1", correct=True)
        raise RuntimeError("a trace\nno such kernel")

    def wrong(setting: Any) -> Iterator[Any]:
        yield rows.Row(name="second", measured="2", correct=False)

    def slow(setting: Any) -> Iterator[Any]:
        yield rows.Row(name="third", target=">= 3", measured="2.5", met=False)

    file = tmp_path / "gpu.json"

    def run(**sections: Any) -> tuple[int, list[str]]:
        monkeypatch.setattr(gpu, "SECTIONS", {name: (one, 60) for name, one in sections.items()})
        chosen = ("--json", str(file), "--sections", ",".join(sections))
        monkeypatch.setattr("sys.argv", ["gpu.py", "--device", "cpu", *chosen])
        status = gpu.main()
        parts = json.loads(file.read_text())["sections"].values()
        return status, [row["name"] for part in parts for row in part["rows"]]

    assert run(broken=broken, slow=slow) == (1, ["first", "section broken", "third"])
    assert run(wrong=wrong) == (1, ["second"])
    assert run(slow=slow) == (0, ["third"])
    out = capsys.readouterr().out
    assert "no such kernel" in out
    assert "a trace" not in out
    assert "missed" in out


def test_weights_that_differ_from_the_reference_or_between_ranks_are_no_pass() -> None:
    module = load("gpu_correctness")
    reference = {"weights": torch.tensor([1.0, 2.0], dtype=torch.float64), "scale": 1.0}
    near = {"weights": reference["weights"] + 1e-13, "scale": 1.0}
    far = {"weights": reference["weights"] + 1e-11, "scale": 1.0}
    assert module._row("", [near, near], reference).correct
    assert not module._row("", [far, far], reference).correct
    assert not module._row("", [near, reference], reference).correct
    assert not module._lossy("", [reference], reference).correct
