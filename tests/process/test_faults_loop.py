"""The fault suite's loops: processes of a script kill themselves at chosen moments of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from torch import Tensor

from tests.harness.processes.command import Result
from tests.harness.processes.fault_runs import EXACT, distance, load, proof_of
from tests.harness.processes.launcher_commands import run

SCRIPT = ("-m", "tests.harness.library.fault_script")
SAMPLES, EPOCHS = 50, 4


def trained(folder: Path) -> list[Mapping[str, Tensor]]:
    """Return the last weights of each process that trained to the end."""
    return [load(path) for path in folder.glob("weights.*.pt")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Mapping[str, Tensor]]:
    """Return the weights of one process, by the case."""
    made: dict[str, Mapping[str, Tensor]] = {}

    def train(name: str) -> Mapping[str, Tensor]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            ended = run("python", *SCRIPT, name, folder=folder)
            assert ended.status == 0, ended.text
            (made[name],) = trained(folder)
        return made[name]

    return train


def launch(folder: Path, ranks: int, *words: str) -> Result:
    return run("paceline", *SCRIPT, *words, folder=folder, ranks=ranks)


def requires_exact(folder: Path) -> None:
    proof = proof_of(folder)
    assert proof.exact, proof.faults
    assert [account.once for account in proof.accounts] == [SAMPLES] * EPOCHS


@pytest.mark.parametrize(
    ("name", "ranks", "moments"),
    [
        ("accumulation", 4, ("0:0:2:accumulated:1", "1:1:3:unscaled:0", "2:2:3:updated:1")),
        ("sharded", 4, ("0:0:0:backward:0", "1:1:4:forward:2", "2:2:2:updated:0")),
        ("allreduce", 3, ("0:1:0:forward:0", "1:2:4:between:1")),
        ("copy", 3, ("0:1:1:forward:1", "1:2:1:backward:1")),
        ("state", 3, ("0:1:1:forward:1",)),
        ("settle", 3, ("0:1:1:backward:1",)),
        ("checkpoint", 3, ("0:1:0:between:1", "1:2:1:backward:0")),
        ("allreduce", 3, ("0:0:0:forward:0",)),
    ],
)
def test_a_loop_continues_whenever_in_its_steps_a_process_is_killed(
    tmp_path: Path,
    alone: Callable[[str], Mapping[str, Tensor]],
    name: str,
    ranks: int,
    moments: tuple[str, ...],
) -> None:
    ended = launch(tmp_path, ranks, name, *moments)
    assert ended.status == 0, ended.text
    assert ended.text.count(" as generation ") == len(moments)
    assert "Traceback" not in ended.text
    requires_exact(tmp_path / "runs" / name)
    weights = trained(tmp_path)
    assert len(weights) == ranks - len(moments)
    for each in weights:
        assert distance(each, weights[0]) == 0
        assert distance(each, alone(name if name == "accumulation" else "allreduce")) < EXACT


@pytest.mark.parametrize("moment", ["0:1:0:evaluation:1", "0:1:0:total:0"])
def test_a_loss_in_a_scripts_own_evaluation_is_survived_and_its_sums_are_said_to_lack_a_part(
    tmp_path: Path, alone: Callable[[str], Mapping[str, Tensor]], moment: str
) -> None:
    ended = launch(tmp_path, 3, "totals", moment)
    assert ended.status == 0, ended.text
    assert ended.text.count(" as generation ") == 1
    lacks = "world.total() is made by the remaining ranks: what only the lost rank had"
    assert ended.text.count(lacks) == 1
    assert "Traceback" not in ended.text
    requires_exact(tmp_path / "runs" / "totals")
    weights = trained(tmp_path)
    assert len(weights) == 2
    for each in weights:
        assert distance(each, alone("allreduce")) < EXACT


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("within", "0:1:2:between:1"),
        ("totals_within", "0:1:2:between:1"),
        ("totals_within", "0:1:2:evaluation:1"),
        ("totals_within", "0:1:2:total:0"),
    ],
)
def test_an_evaluation_among_the_steps_that_notices_a_loss_is_made_again(
    tmp_path: Path, alone: Callable[[str], Mapping[str, Tensor]], name: str, moment: str
) -> None:
    ended = launch(tmp_path, 3, name, moment)
    assert ended.status == 0, ended.text
    assert ended.text.count(" as generation ") == 1
    assert "Traceback" not in ended.text
    requires_exact(tmp_path / "runs" / name)
    weights = trained(tmp_path)
    assert len(weights) == 2
    for each in weights:
        assert distance(each, alone("allreduce")) < EXACT


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], frozenset[str]]:
    """Return the lines of one process's evaluations, by the case."""
    made: dict[str, frozenset[str]] = {}

    def evaluate(name: str) -> frozenset[str]:
        if name not in made:
            ended = run("python", *SCRIPT, name, folder=tmp_path_factory.mktemp(name))
            made[name] = evaluations(ended)
        return made[name]

    return evaluate


def evaluations(ended: Result) -> frozenset[str]:
    return frozenset(re.findall(r"epoch \d, batch \d: \d+\.\d{9} of \d+ samples", ended.text))


@pytest.mark.parametrize(
    ("name", "moments", "late"),
    [
        ("evaluation", ("0:0:0:evaluation:1", "1:1:0:ended:2", "2:2:0:evaluated:0"), ""),
        ("within", ("0:0:2:evaluation:0", "1:2:0:evaluation:1"), ""),
        ("evaluation", ("0:1:0:ended:0",), "0:1:0:late_epoch_end:1"),
        ("untold", ("0:1:0:total:0",), "0:1:0:late_evaluation:1"),
        ("twice", ("0:1:0:evaluation:0", "1:2:1:evaluation:1"), ""),
        ("twice", ("0:1:0:evaluation:0",), "0:1:0:late_begin:1"),
        ("untold_twice", ("0:1:0:total:0",), "0:1:0:late_evaluation:1"),
        ("within", ("0:1:0:forward:1",), "0:0:0:late_next_epoch:0"),
    ],
)
def test_a_loop_continues_whenever_between_its_steps_a_process_is_killed(
    tmp_path: Path,
    alone: Callable[[str], Mapping[str, Tensor]],
    losses: Callable[[str], frozenset[str]],
    name: str,
    moments: tuple[str, ...],
    late: str,
) -> None:
    ranks = 4 if len(moments) > 2 else 3
    ended = launch(tmp_path, ranks, name, *moments, *late.split())
    assert ended.status == 0, ended.text
    assert ended.text.count(" as generation ") == len(moments)
    assert "Traceback" not in ended.text
    requires_exact(tmp_path / "runs" / name)
    assert evaluations(ended) == losses(name)
    weights = trained(tmp_path)
    assert len(weights) == ranks - len(moments)
    for each in weights:
        assert distance(each, weights[0]) == 0
        assert distance(each, alone("allreduce")) < EXACT
