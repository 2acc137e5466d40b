"""Kills at random moments of runs with parameter servers; `server_kills` makes any number."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.harness.processes.server_kills import Kill, References, check


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(3))
def test_a_run_is_exact_whenever_a_process_of_it_is_killed(
    number: int, tmp_path: Path, references: References
) -> None:
    seed = random.getrandbits(30)  # of the seed that pytest shows; another one in each run
    check(Kill.draw_any(seed + number), tmp_path, references)
