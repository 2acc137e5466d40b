"""Samples that a sampler draws: once an epoch, for any number of ranks, and again after a kill."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.ledger import main as ledger
from tests.harness.equivalence.large_batch import largest_difference
from tests.harness.library.sampled_runs import KINDS, run_sampled
from tests.harness.network.ports import free_ports
from tests.harness.processes.gloo_processes import spawn


def of_all(states: list[dict[str, Any]], kind: str) -> list[list[int]]:
    """Return the samples of each global batch."""
    return [list(chain(*of_ranks)) for of_ranks in zip(*(s[kind][0] for s in states), strict=True)]


def test_a_sampler_draws_for_all_ranks_and_its_order_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = spawn(1, run_sampled, free_ports(3 * len(KINDS)), str(tmp_path))
    states = spawn(3, run_sampled, free_ports(3 * len(KINDS)), str(tmp_path))
    for kind in KINDS:
        assert of_all(states, kind) == of_all(alone, kind)
        epochs = len(of_all(states, kind))
        for state in states:
            whole, weights, rest, resumed = state[kind]
            assert largest_difference(weights, alone[0][kind][1]) < 1e-10
            assert len(rest) < epochs
            assert rest == whole[-len(rest) :]
            for name, value in weights.items():
                assert torch.equal(resumed[name], value), (kind, name)
        assert ledger([str(tmp_path / f"{kind}-3")]) == 0
        assert "Exact: each position in the sampler's order was trained" in capsys.readouterr().out
