"""Workers that average go back to the end of a round, with fewer members and with all again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.cli import ledger
from tests.harness.equivalence.trainer_breaks import Moment
from tests.harness.equivalence.trainer_rollbacks import (
    EPOCHS,
    FLOAT32,
    FLOAT64,
    SAMPLES,
    TrainerRollbacks,
)

AVERAGE = ("--sync", "average", "--bucket_mb", "0.002", "--average_every")
CASES = {
    "at once": (*AVERAGE, "2", *FLOAT64),
    "delayed": (*AVERAGE, "3", "--average_delay", "1", "--outer", "diloco", *FLOAT64),
    "fragments": (*AVERAGE, "2", "--fragments", "2", "--average_momenta", "average", *FLOAT64),
    "int8": (*AVERAGE, "2", "--wire", "int8", *FLOAT32),
}
MOMENTS: list[list[Moment]] = [
    [(4, "backward"), (3, "update"), (4, "load")],
    [(7, "forward"), (6, "update"), (6, "end")],
]


@pytest.mark.parametrize("parked", [[(1,)], [(1,), ()]], ids=["fewer", "fewer and back"])
@pytest.mark.parametrize("name", CASES)
def test_workers_that_average_continue_as_if_members_had_left_at_the_end_of_a_round(
    name: str, parked: list[tuple[int, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, machines, moments = CASES[name], (1, 1, 1), MOMENTS[: len(parked)]
    lost = TrainerRollbacks(tmp_path / "lost", flags, machines, moments, parked)
    states = lost.run()
    left: list[list[Moment]] = [[(start, "forward")] * 3 for start in lost.starts]
    # Each worker trains a round's steps at its own pace: none may end another one's last round.
    replay = TrainerRollbacks(tmp_path / "replay", flags, machines, left, parked, together=True)
    replayed = replay.run()
    assert replay.starts == lost.starts
    assert all(lost.starts), "the first snapshot was the start, so nothing was to be carried on"
    for rank in set(range(3)) - set(parked[-1]):
        for key, value in replayed[0].items():
            assert torch.equal(states[rank][key], value), (rank, key)
    capsys.readouterr()
    assert ledger.main([str(lost.folder), "--json"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert [one["once"] for one in proof["accounts"]] == [SAMPLES] * EPOCHS
