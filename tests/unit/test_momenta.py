"""Which entries of torch's optimizers are averaged over workers, and what each update retains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.reduce.buckets import partition
from paceline.update.momenta import MomentumValues, find_momenta


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(2)
    return {"weight": nn.Parameter(torch.randn(4, 3)), "bias": nn.Parameter(torch.randn(4))}


def momenta(named: dict[str, nn.Parameter], optimizer: Optimizer) -> list[MomentumValues]:
    names = {p: name for name, p in named.items()}
    buckets = partition(names, dict.fromkeys(names, 0), 2**20)
    return [values for each in find_momenta(optimizer, buckets) for values in each]


@pytest.mark.parametrize(
    ("kind", "options", "decays"),
    [
        (torch.optim.SGD, {"momentum": 0.7}, {"momentum_buffer": 0.7}),
        (torch.optim.AdamW, {"betas": (0.8, 0.9)}, {"exp_avg": 0.8, "exp_avg_sq": 0.9}),
        (torch.optim.NAdam, {"betas": (0.8, 0.9)}, {"exp_avg": 0.8, "exp_avg_sq": 0.9}),
        (torch.optim.RAdam, {"betas": (0.8, 0.9)}, {"exp_avg": 0.8, "exp_avg_sq": 0.9}),
        (torch.optim.Adamax, {"betas": (0.8, 0.9)}, {"exp_avg": 0.8, "exp_inf": 0.9}),
        (
            torch.optim.RMSprop,
            {"alpha": 0.9, "momentum": 0.6, "centered": True},
            {"square_avg": 0.9, "grad_avg": 0.9, "momentum_buffer": 0.6},
        ),
        (torch.optim.Adadelta, {"rho": 0.8}, {"square_avg": 0.8, "acc_delta": 0.8}),
        (torch.optim.Adagrad, {}, {"sum": 1.0}),
    ],
)
def test_a_step_without_gradient_multiplies_momenta_by_their_decay(
    kind: Any, options: dict[str, Any], decays: dict[str, float]
) -> None:
    named = parameters()
    optimizer = kind(named.values(), lr=0.01, **options)
    found = momenta(named, optimizer)
    assert {values.names[0].split()[0]: values.decay for values in found} == decays
    assert not optimizer.state or kind is torch.optim.Adagrad
    for gradient in (1.0, 0.0):
        before = [torch.zeros(sum(values.lengths)) for values in found]
        for values, flat in zip(found, before, strict=True):
            values.read(flat)
        for p in named.values():
            p.grad = torch.full_like(p, gradient)
        optimizer.step()
    for values, old in zip(found, before, strict=True):
        new = torch.empty_like(old)
        values.read(new)
        assert old.abs().min() > 0
        if values.names[0].startswith("acc_delta"):
            assert (new >= old * values.decay).all()
        else:
            torch.testing.assert_close(new, old * values.decay, rtol=1e-5, atol=1e-9)


def test_the_decay_follows_the_options_of_the_group() -> None:
    named = parameters()
    optimizer = torch.optim.SGD(
        [{"params": [p], "momentum": 0.5 + 0.1 * i} for i, p in enumerate(named.values())], 0.1
    )
    names = {p: name for name, p in named.items()}
    buckets = partition(names, {p: i for i, p in enumerate(names)}, 2**20)
    found = {v.names[0]: v for each in find_momenta(optimizer, buckets) for v in each}
    weight, bias = found["momentum_buffer of weight"], found["momentum_buffer of bias"]
    assert (weight.decay, bias.decay) == (0.5, 0.6)
    state = optimizer.state_dict()
    state["param_groups"][1]["momentum"] = 0.9
    optimizer.load_state_dict(state)  # which makes new groups
    assert (weight.decay, bias.decay) == (0.5, 0.9)


def test_entries_of_other_shapes_stay_the_workers_own() -> None:
    named = parameters()
    with pytest.raises(ConfigError, match="Adafactor with its present options has no momenta"):
        momenta(named, torch.optim.Adafactor(named.values()))


def test_zeros_make_no_state_and_values_do() -> None:
    named = parameters()
    optimizer = torch.optim.Adam(named.values())
    (exp_avg, _) = momenta(named, optimizer)
    flat = torch.zeros(sum(exp_avg.lengths))
    exp_avg.write(flat)
    assert not optimizer.state
    flat[: exp_avg.lengths[0]] = 2.0
    exp_avg.write(flat)
    (only,) = optimizer.state.values()
    assert set(only) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(only["step"], torch.tensor(1.0))  # as after one update
    assert (only["exp_avg"] == 2).all()
    assert (only["exp_avg_sq"] == 0).all()


def test_sparse_momenta_become_dense() -> None:
    table = nn.Parameter(torch.zeros(4, 2))
    optimizer = torch.optim.SGD([table], lr=0.1, momentum=0.9)
    table.grad = torch.ones(4, 2).to_sparse()
    optimizer.step()
    (values,) = momenta({"table": table}, optimizer)
    flat = torch.zeros(8)
    values.read(flat)
    values.write(flat)
    assert torch.equal(optimizer.state[table]["momentum_buffer"], torch.ones(4, 2))
    optimizer.step()
    assert torch.equal(optimizer.state[table]["momentum_buffer"], torch.full((4, 2), 1.9))
