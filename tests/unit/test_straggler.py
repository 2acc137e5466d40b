"""The rank that held others back in an epoch: by the ranks' own times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import nn
from torch.optim import SGD

from paceline.config.world import SyncConfig
from paceline.run.straggler import RanksApart, Straggler, straggler_of
from paceline.timeline.timeline import WAIT_FOR_STAGES
from tests.harness.equivalence.pipelines import PipelineRank, on_ranks


@pytest.mark.parametrize(
    ("own", "seconds", "expected"),
    [
        ([4.0, 12.0], 12.5, Straggler(1, 8.0, 8.0 / 12.5)),
        ([2.0, 1.0, 1.5, 8.0], 10.0, Straggler(3, 6.5, 0.65)),
        ([9.0, 9.0, 1.0], 10.0, Straggler(0, 4.0, 0.4)),  # the other slow one didn't wait for it
        ([9.0, 9.4], 10.0, None),
        ([9.0], 10.0, None),
        ([0.5, 1.4], 2.0, None),  # by chance
    ],
)
def test_the_straggler_is_the_rank_for_which_others_waited(
    own: Sequence[float], seconds: float, expected: Straggler | None
) -> None:
    assert straggler_of(own, seconds) == expected


def test_a_stage_is_named_whose_ranks_are_slow_in_each_replica() -> None:
    def run(rank: PipelineRank) -> tuple[int, object]:
        context = rank.run.context
        now = [0]
        context.timeline.clock = lambda: now[0]
        model = nn.Linear(2, 2)
        replica = rank.bind(model, SGD(model.parameters(), lr=0.1), SyncConfig())  # type: ignore[arg-type]
        times = RanksApart(rank.run, replica, measured=False)
        times.begin_step(0)
        now[0] += (2, 3, 9, 8)[context.world.rank] * 10**9
        with context.timeline.span(WAIT_FOR_STAGES):
            now[0] += 10**9
        times.leave_steps()
        return context.stage, times.epoch_fields()["straggler"]

    found = on_ranks(run, 2, 2)
    assert [stage for stage, _ in found] == [0, 0, 1, 1]
    assert {straggler for _, straggler in found} == {Straggler(2, 6.0, 0.6, 1)}
