"""What the blocks of a pipeline may do: results of one process, or a sentence that refuses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import ConfigError
from tests.contract.test_pipeline import SCHEDULES, WIDTH, batches, mlp, require_equal
from tests.harness.equivalence.pipelines import PipelineRank, on_ranks


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_stage_may_begin_with_an_operation_in_place(schedule: str, checkpoints: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 3)]
    model = nn.Sequential(nn.ELU(inplace=True), *layers).double()
    data = [(x.clone(), y) for x, y in batches(8, 8)]
    options: dict[str, Any] = {"checkpoint_activations": checkpoints, "schedule": schedule}
    for x, _ in data:
        x.abs_()  # which a first block in place leaves as they are: each training gets the same
    require_equal(model, 2, data=data, microbatches=2, cuts=["2"], **options)


class Rotation(nn.Module):
    """A block that returns complex values, or gets them."""

    def __init__(self, *, back: bool) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.linspace(0.1, 0.7, WIDTH, dtype=torch.float64))
        self.back = back

    def forward(self, x: Tensor) -> Tensor:
        turned = x * torch.polar(torch.ones_like(self.angle), self.angle)
        return turned.real + 0.5 * turned.imag if self.back else turned.conj()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_complex_values_travel_with_their_gradients(schedule: str) -> None:
    model = mlp(Rotation(back=False), Rotation(back=True))
    require_equal(model, 2, microbatches=2, cuts=["9"], schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("frozen", [range(3), range(3, 6), range(6, 9)], ids=str)
def test_a_stage_may_be_frozen(schedule: str, frozen: range) -> None:
    model = mlp()
    for block in frozen:
        model[block].requires_grad_(False)
    require_equal(model, 3, microbatches=3, cuts=["3", "6"], schedule=schedule)


class Larger(nn.Module):
    """A block that returns more than the meta device has shown, and one that drops it."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return x if x.is_meta else x.repeat(1, self.times)[:, : WIDTH * self.times]


class Smaller(nn.Module):
    """A block that drops it."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :WIDTH]


def test_values_that_have_no_room_are_refused() -> None:
    ((x, y),) = batches(800)
    model = mlp(Larger(3), Smaller())

    def run(rank: PipelineRank) -> str:
        stage = rank.cut(model, F.cross_entropy, microbatches=2, cuts=["9"])
        try:
            stage.train_batch(x, y)
        except ConfigError as error:
            rank.run.context.abort()
            return str(error)
        except Exception:
            return ""
        return "trained"

    assert on_ranks(run, 2) == [
        f"a stage returns torch.float64 of shape (400, {3 * WIDTH}), for which its receiver has no "
        f"memory: on the meta device the stages returned {400 * WIDTH * 8:,} bytes at most. Use "
        "operations whose results' shapes follow from shapes alone.",
        "",
    ]
