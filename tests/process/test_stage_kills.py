"""Kills at random moments of a pipeline of 2 stages × 2 replicas: the other replica continues.

    python -m tests.process.test_stage_kills 10        as many moments of each member

It prints the seconds from the detection of each loss to the next generation's first step.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from random import Random
from statistics import median

import pytest
from torch import Tensor

from paceline.observe.event_file import find_event_files, read_events
from tests.harness.library.pipeline_kills import EPOCHS, PLACES, UNSEEN_AT, UPDATED_AT, whole_alone
from tests.harness.processes.fault_runs import EXACT, distance, load, proof_of
from tests.harness.processes.launcher_commands import run

SCRIPT = ("-m", "tests.harness.library.pipeline_kills")
RANKS = 4
SAMPLES = 50
_PARTS = ("interrupt", "decide", "restore", "form")  # of a change of the generation


def check(folder: Path, expected: Mapping[str, Tensor], *moments: str) -> list[float]:
    """Make a run with a kill; return the seconds of the change in each process."""
    ended = run("paceline", *SCRIPT, "runs/r", *moments, folder=folder, ranks=RANKS)
    assert ended.status == 0, ended.text
    assert "Traceback" not in ended.text
    assert ended.text.count(". 2 processes continue from ") == 1, ended.text
    weights = [load(path) for path in folder.glob("weights.*.pt")]
    assert len(weights) == 2
    for each in weights:
        assert distance(each, expected) < EXACT
    proof = proof_of(folder / "runs" / "r")
    assert proof.exact, proof.faults
    assert [account.once for account in proof.accounts] == [SAMPLES] * EPOCHS
    events = [e for _, path in find_event_files(folder / "runs" / "r") for e in read_events(path)]
    return [sum(e[part] for part in _PARTS) for e in events if e["event"] == "recovery"]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_other_replica_continues_exactly_whenever_a_stage_is_killed(
    seed: int, tmp_path: Path
) -> None:
    draw = Random(seed)
    member = draw.randrange(RANKS)
    assert check(tmp_path, whole_alone(), f"{member}:{draw.randrange(1, PLACES)}")


@pytest.mark.parametrize(
    ("killed_at", "learns_at"),
    [(UNSEEN_AT, UNSEEN_AT), (UPDATED_AT, UPDATED_AT + 1)],
    ids=["between epochs", "after an update"],
)
def test_the_other_replica_continues_from_an_evaluation_in_which_it_learns_of_the_loss(
    killed_at: int, learns_at: int, tmp_path: Path
) -> None:
    assert check(tmp_path, whole_alone(), f"2:{killed_at}", f"3:{learns_at}:wait")


def main(count: int) -> None:
    """Kill each member at so many moments."""
    expected = whole_alone()
    everything: list[float] = []
    for member in range(RANKS):
        for number in range(count):
            place = Random(f"{member} {number}").randrange(1, PLACES)
            with tempfile.TemporaryDirectory() as name:
                seconds = check(Path(name), expected, f"{member}:{place}")
            everything += seconds
            each = ", ".join(f"{one:.2f}" for one in seconds)
            print(f"member {member} at its place {place}: {each} s", flush=True)
    print(f"median {median(everything):.2f} s, at most {max(everything):.2f} s; all exact")


if __name__ == "__main__":
    main(int(sys.argv[1]))
