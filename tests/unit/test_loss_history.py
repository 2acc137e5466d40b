"""What a loss cost: the seconds from its detection to the first step that wasn't made before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.cluster.supervision.requests.run_status import MemberLoss
from paceline.observe.loss_history import LossHistory

COST = "made its first new step {:.2f} s after the loss was detected.\n"


def test_a_loss_costs_the_time_to_the_first_new_step(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    history = LossHistory(SimpleNamespace(leads=True), clock=lambda: now[0])
    for step in range(8):
        history.event("step", step=step)
    change = {"generation": 1, "lost": ["a-1"], "causes": ["rank 1 was killed"], "start": 6}
    history.event("change", detected_at=10.0, **change)
    (loss,) = history.losses
    assert loss == MemberLoss(member="a-1", generation=0, cause="rank 1 was killed")
    now[0] = 12.0
    history.event("step", step=6)
    history.event("step", step=7)  # made before
    assert history.losses == (loss,)
    now[0] = 13.5
    history.event("step", step=8)
    assert [each.seconds for each in history.losses] == [3.5]
    assert capsys.readouterr().err == f"paceline: Generation 1 {COST.format(3.5)}"


@pytest.mark.parametrize("leads", [True, False])
def test_losses_in_a_recovery_cost_the_time_since_the_first(
    leads: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    history = LossHistory(SimpleNamespace(leads=leads), clock=lambda: 20.0)
    history.event("change", generation=4, lost=["a-1"], causes=["x"], detected_at=10.0)
    history.event("change", generation=5, lost=["a-0"], causes=["y"], detected_at=12.0)
    history.event("step", step=0)
    history.event("step", step=1)
    assert [(each.generation, each.seconds) for each in history.losses] == [(3, 10.0), (4, 10.0)]
    printed = f"paceline: Generation 5 {COST.format(10.0)}"
    assert capsys.readouterr().err == (printed if leads else "")
