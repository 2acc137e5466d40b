"""Snapshots have masters in place of the 16-bit parameters, which are rounded anew of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.replica.state_parts import PARAMETERS, RANK, REQUIRES_GRAD
from paceline.update.master_weights import MASTER
from tests.harness.equivalence.backup_members import BackupMembers
from tests.harness.equivalence.large_batch import largest_difference
from tests.harness.equivalence.trainer_breaks import Moment, drawn
from tests.harness.equivalence.trainer_rollbacks import FLOAT32, STEPS, TrainerRollbacks
from tests.harness.equivalence.undisturbed_runs import undisturbed

NARROW = (
    *("--sync", "notified", "--update", "sharded", "--bucket_mb", "0.1"),
    *("--param_dtype", "bfloat16", "--dtype", "bfloat16", "--force_bfloat16", *FLOAT32),
)
THREE = (1, 1, 1)
DIVIDED = ("--snapshot_copies", "divided")


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(one[key], value) for key, value in other.items())


@pytest.mark.parametrize("machines", [THREE, (2, 1)], ids=str)
@pytest.mark.parametrize("flags", [(), DIVIDED], ids=["whole", "divided"])
def test_all_go_back_and_end_with_the_bits_of_an_undisturbed_run(
    tmp_path: Path, flags: tuple[str, ...], machines: tuple[int, ...]
) -> None:
    plain = undisturbed(NARROW, machines)
    moments: list[list[Moment]] = [[(STEPS + 2, "backward")] * 3, [(STEPS + 2, "load")] * 3]
    run = TrainerRollbacks(tmp_path / "run", (*NARROW, *flags), machines, moments)
    held: list[Any] = []
    agree = run._agree

    def noted(c: Any, number: int) -> Any:
        own = run._snapshots[c.rank]
        start = agree(c, number)
        held.append(own._snapshots.state(start))
        return start

    run._agree = noted  # type: ignore[method-assign]
    states = run.run()
    assert all(equal(state, plain.states[0]) for state in states)
    assert len(held) == 6
    for state in held:
        names = state[REQUIRES_GRAD]
        assert {name for name in names if name.endswith("weight")}.isdisjoint(state[PARAMETERS])
        assert not any(p.dtype is torch.bfloat16 for p in state[PARAMETERS].values())
        masters = state[RANK]["optimizer"]
        assert all(MASTER in own for name, (_, _, own) in masters.items() if "weight" in name)


@pytest.mark.parametrize("flags", [(), DIVIDED], ids=["whole", "divided"])
def test_a_member_is_lost_and_the_others_continue_from_memory(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    plain = undisturbed(NARROW, THREE)
    backups = BackupMembers(prompt=True)
    run = TrainerRollbacks(
        tmp_path / "run", (*NARROW, *flags), THREE, drawn(4, [3], 3), [(1,)], backups
    )
    states = run.run()
    backups.close()
    assert run.from_disk == [False]
    assert equal(states[0], states[2])
    assert largest_difference(states[0], plain.states[0]) < 0.02  # other sums, in 16 bits


def test_a_member_continues_from_a_checkpoint_where_all_that_have_a_part_are_lost(
    tmp_path: Path,
) -> None:
    backups = BackupMembers()
    moments: list[list[Moment]] = [[(STEPS + 2, "backward")] * 4]
    flags = (*NARROW, *DIVIDED)
    run = TrainerRollbacks(tmp_path / "run", flags, (1, 1, 1, 1), moments, [(1, 2)], backups)
    states = run.run()
    backups.close()
    assert run.from_disk == [True]
    again = TrainerRollbacks(
        tmp_path / "again", NARROW, (1, 1, 1, 1), [[(STEPS, "load")] * 4], [(1, 2)]
    )
    expected = again.run()
    assert again.starts == run.starts == [STEPS]
    assert equal(states[0], expected[0])
    saved: dict[str, Tensor] = torch.load(next((tmp_path / "run").rglob("*.pt")))
    assert saved
