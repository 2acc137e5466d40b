"""One script under all launchers, with equal losses; and how it ends there when a rank fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.processes.launcher_commands import run
from tests.harness.processes.python_program import ROOT

EXAMPLE = str(ROOT / "examples/launchers.py")
SCRIPT = ("-m", "tests.harness.library.library_script")
SHOWN = 'library_script.py", line'  # in a traceback
TWO_RANKS = ("paceline", "torchrun", "mpirun", "slurm")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the example says without a launcher."""
    ended = run("python", EXAMPLE, folder=tmp_path_factory.mktemp("alone"))
    assert ended.status == 0
    return ended.text.splitlines()


@pytest.mark.parametrize("launcher", TWO_RANKS)
def test_the_example_has_the_same_losses_under(
    launcher: str, alone: list[str], tmp_path: Path
) -> None:
    ended = run(launcher, EXAMPLE, folder=tmp_path, real=launcher == "mpirun")
    assert ended.status == 0, ended.text
    assert ended.text.splitlines() == alone
    assert len(alone) == 4


@pytest.mark.parametrize("launcher", TWO_RANKS)
def test_a_world_that_was_closed_can_be_joined_again(launcher: str, tmp_path: Path) -> None:
    twice = (*SCRIPT, "run", "--epochs", "2", "--joins", "2", "--sync", "notified")
    ended = run(launcher, *twice, folder=tmp_path)
    assert ended.status == 0, ended.text
    steps = re.findall(r"^step (\d+)", ended.text, re.MULTILINE)
    assert steps == [str(number) for number in range(20)]


@pytest.mark.parametrize("launcher", TWO_RANKS)
def test_a_ranks_own_words_are_said_once_and_end_all(launcher: str, tmp_path: Path) -> None:
    ended = run(launcher, *SCRIPT, "", "--fail", "1:3:config", folder=tmp_path)
    assert len(re.findall(r"rank 1 on machine 0 \(.*\): the script says no\.", ended.text)) == 1, (
        ended.text
    )
    assert SHOWN not in ended.text  # torchrun itself ends with a traceback of its own
    if launcher in ("paceline", "slurm"):  # the others have statuses of their own
        assert ended.status == 2


@pytest.mark.parametrize("launcher", ["paceline", "slurm"])
def test_a_scripts_bug_shows_one_traceback_and_ends_all(launcher: str, tmp_path: Path) -> None:
    ended = run(launcher, *SCRIPT, "", "--fail", "1:3:raise", folder=tmp_path)
    assert ended.status != 0
    assert ended.text.count("Traceback") == 1, ended.text
    assert SHOWN in ended.text


def test_a_bug_of_a_script_alone_is_a_plain_traceback(tmp_path: Path) -> None:
    ended = run("python", *SCRIPT, "", "--fail", "0:3:raise", folder=tmp_path)
    assert ended.status == 1
    assert "paceline:" not in ended.text
    assert ended.text.count("Traceback") == 1


def test_a_sentence_of_a_script_alone(tmp_path: Path) -> None:
    ended = run("python", *SCRIPT, "", "--fail", "0:3:config", folder=tmp_path)
    assert (ended.status, ended.text.splitlines()[-1]) == (2, "paceline: the script says no.")
    assert "Traceback" not in ended.text
