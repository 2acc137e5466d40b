"""A `GradScaler` on ranks that have no samples in some steps, under autocast on CPUs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.communicator import Communicator
from tests.contract.test_replica_check import method
from tests.harness.equivalence.large_batch import Kind, convnet, made_up_batches, replicate
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step

STEPS = 6


def train(
    c: Communicator, model: nn.Module, dtype: torch.dtype, *, kind: Kind, reduced: bool
) -> dict[str, Tensor]:
    """Train; in each step another rank, the first one in the first step, is without samples.

    Args:
        c: the communicator.
        model: the model.
        dtype: of autocast.
        kind: the method.
        reduced: the loop calls `reduce()` before `unscale_`, as all ranks' gradients change there.
    """
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    replica = replicate(own, optimizer, c, 2_000, kind)
    found = {}
    for number, (x, y) in enumerate(made_up_batches([12] * STEPS)):
        training = [rank for rank in range(c.world_size) if rank != number % c.world_size]
        parts = dict(zip(training, torch.arange(12).chunk(len(training)), strict=True))
        with replica_step(replica, number, len(parts.get(c.rank, ())) / 12):
            optimizer.zero_grad()
            if c.rank in parts:
                with torch.autocast("cpu", dtype):
                    loss = F.cross_entropy(own(x[parts[c.rank]].float()), y[parts[c.rank]])
                scaler.scale(loss * (torch.inf if number == 3 else 1)).backward()
            if reduced:
                if scaler._scale is None:
                    scaler.scale(torch.zeros(()))
                replica.reduce()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(own.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        found[f"scale {number}"] = torch.tensor(scaler.get_scale())
    found |= {name: value.clone() for name, value in own.state_dict().items()}
    replica.drain()
    replica.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["allreduce", "notified", "sharded"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_without_samples_unscales_as_the_others(
    world_size: int, kind: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    model = convnet().float()

    def on_ranks(*, reduced: bool) -> list[dict[str, Tensor]]:
        make = method(kind, world_size)
        return run_ranks(world_size, lambda c: train(c, model, dtype, kind=make, reduced=reduced))

    first, *others = on_ranks(reduced=False)
    expected = on_ranks(reduced=True)
    for state in (*others, *expected):
        assert state.keys() == first.keys()
        assert all(torch.equal(first[name], state[name]) for name in first)
    assert first["scale 3"] < first["scale 2"]  # its gradients weren't finite on any rank
    assert not torch.equal(first["0.weight"], model.state_dict()["0.weight"])


def test_a_scaler_that_no_replica_registers_stays_torchs() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler.unscale_(optimizer)
