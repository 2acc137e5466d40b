"""Kills at random moments of a loop with evaluations, meters and counters of its own.

    python -m tests.process.test_random_kills 40        as many seeds, from 0 on

Public reports of the kind: sql-machine-learning/elasticdl#1259 (an evaluation's batches count twice
after a kill), horovod/horovod#3143 (indices of trained samples are lost with a node),
horovod/horovod#2844 (a wrong epoch after a reset).
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.event_file import find_event_files, read_events
from paceline.observe.ledger import prove
from tests.harness.library.kills_script import BATCH, EPOCHS, RANKS, SAMPLES, TEST
from tests.harness.processes.command import Result, run

SCRIPT = (sys.executable, "-m", "tests.harness.library.kills_script")
CLOSE = 1e-10


def launch(folder: Path, name: str, ranks: int, *words: str) -> Result:
    return run("launch", "-n", str(ranks), "--", *SCRIPT, name, *words, folder=folder)


def results_of(ended: Result) -> list[Any]:
    assert ended.status == 0, ended.text
    return [json.loads(line) for line in ended.text.splitlines() if line.startswith("{")]


def assert_close(own: Any, undisturbed: Any) -> None:
    """Require equal whole numbers, and sums that differ by rounding."""
    if isinstance(own, dict):
        assert own.keys() == undisturbed.keys()
        own, undisturbed = list(own.values()), list(undisturbed.values())
    if isinstance(own, list):
        for one, other in zip(own, undisturbed, strict=True):
            assert_close(one, other)
    elif isinstance(own, float):
        assert abs(own - undisturbed) <= CLOSE * max(1.0, abs(undisturbed))
    else:
        assert own == undisturbed


def undisturbed_in(folder: Path) -> Any:
    (alone,) = results_of(launch(folder, "alone", 1))
    steps = SAMPLES // BATCH
    for epoch, (number, made, counted, alike, sums) in enumerate(alone["found"]):
        assert [number, made, counted, alike] == [epoch, *[(epoch + 1) * steps] * 2, True]
        assert [one["samples"] for one in sums] == [SAMPLES, TEST]
    assert len(alone["found"]) == EPOCHS
    return alone


def check(folder: Path, seed: int, undisturbed: Any) -> str:
    """Make a run with kills; return what it said."""
    kills = 1 + seed % (RANKS - 1)
    words = ("--seed", str(seed), "--kills", str(kills))
    ended = launch(folder, f"run{seed}", RANKS, *words)
    results = results_of(ended)
    assert len(results) >= RANKS - kills, ended.text
    for each in results:
        assert_close(each, undisturbed)
    proof = prove(
        (member, read_events(path)) for member, path in find_event_files(folder / f"run{seed}")
    )
    assert proof.exact, proof.faults
    return ended.text


@pytest.mark.parametrize("seed", [1, 2])
def test_counters_and_sums_are_those_of_a_run_without_kills(seed: int, tmp_path: Path) -> None:
    assert "was killed by SIGKILL" in check(tmp_path, seed, undisturbed_in(tmp_path))


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        undisturbed = undisturbed_in(folder)
        for seed in range(count):
            text = check(folder, seed, undisturbed)
            losses = text.count(" as generation ")
            print(f"seed {seed}: {losses} generations were lost, all sums are equal", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
