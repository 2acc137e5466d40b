"""Ranks that work outside a step, and calls that only some ranks make.

Public reports of the kind: pytorch/pytorch#54059 (a validation on one GPU only),
cfzd/Ultra-Fast-Lane-Detection-v2#119 (rank 0 evaluates longer than the others wait),
alan-turing-institute/autocast#381 (rank 0 works on after the last epoch),
Lightning-AI/pytorch-lightning#19045 (a collective save on some ranks).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from paceline.observe.event_file import find_event_files, read_events
from paceline.observe.ledger import prove
from tests.harness.library.busy_script import EPOCHS
from tests.harness.processes.command import Result, run
from tests.harness.processes.launcher_commands import run as run_by
from tests.harness.processes.python_program import ROOT

MODULE = "tests.harness.library.busy_script"
SCRIPT = ("-m", MODULE)
STEPS = 5  # an epoch
TIMEOUT = 4.0
BUSY = ("--seconds", str(2 * TIMEOUT))


def launch(folder: Path, size: int, *words: str, how: str) -> Result:
    python = (sys.executable, *SCRIPT)
    limits = ("--timeout", str(TIMEOUT))
    return run("launch", "-n", str(size), *limits, "--", *python, how, *words, folder=folder)


def assert_exact(run_folder: Path) -> None:
    proof = prove((member, read_events(path)) for member, path in find_event_files(run_folder))
    assert proof.exact, proof.faults
    assert proof.done == EPOCHS * STEPS


@pytest.mark.parametrize("how", ["work", "held"])
def test_all_ranks_wait_for_one_that_is_busy_for_twice_the_timeout(
    how: str, tmp_path: Path
) -> None:
    """After the last epoch, too, when the others wait for the world's end."""
    words = ("--run", "run", *BUSY)
    ended = launch(tmp_path, 3, *words, how=how)
    assert ended.status == 0, ended.text
    assert ended.text.count("ended with 3 ranks") == 3
    assert len(set(re.findall(r"weights (\S+)", ended.text))) == 1
    assert "continue" not in ended.text
    assert_exact(tmp_path / "run")


@pytest.mark.parametrize("launcher", ["paceline", "torchrun"])
def test_one_that_hangs_for_ever_ends_the_run_and_is_named_with_its_line(
    launcher: str, tmp_path: Path
) -> None:
    words = ("hang", "--timeout", str(TIMEOUT), "--idle_timeout", "3")
    ended = run_by(launcher, *SCRIPT, *words, folder=tmp_path)
    assert ended.status == 1, ended.text
    named = re.findall(
        r"rank 0 on machine 0 \(\S+\) has worked outside a step for \d+ s \(idle_timeout 3\), "
        r"while rank 1 on machine 0 \(\S+\) waits for it in .*: its last step was step 4; then "
        r"came .*; it is at (\S+) in (\S+)\. Give a longer idle_timeout",
        ended.text,
    )
    assert len(named) == 1, ended.text
    ((where, function),) = named
    file, line = where.rsplit(":", 1)
    assert function == "upload()"
    source = (ROOT / "tests/harness/library/busy_script.py").read_text().splitlines()
    assert Path(file).name == "busy_script.py"
    assert source[int(line) - 1].strip() == "threading.Event().wait()"


def test_a_rank_that_is_killed_while_another_one_is_busy_is_lost(tmp_path: Path) -> None:
    words = ("--run", "run", *BUSY)
    ended = launch(tmp_path, 3, *words, how="killed")
    assert ended.status == 0, ended.text
    assert "rank 2 on machine 0" in ended.text
    assert "was killed by SIGKILL" in ended.text
    assert ended.text.count("ended with 2 ranks") == 2
    assert_exact(tmp_path / "run")


def test_a_busy_rank_that_is_killed_is_lost(tmp_path: Path) -> None:
    words = ("--run", "run", *BUSY)
    ended = launch(tmp_path, 3, *words, how="gone")
    assert ended.status == 0, ended.text
    assert "rank 0 on machine 0" in ended.text
    assert "was killed by SIGKILL" in ended.text
    assert ended.text.count("ended with 2 ranks") == 2
    assert_exact(tmp_path / "run")


@pytest.mark.parametrize(
    ("launcher", "how", "call"),
    [
        ("paceline", "loader", "paceline.loader()"),
        ("paceline", "evaluation", "world.evaluation()"),
        ("torchrun", "total", "world.total()"),
        ("paceline", "merge", "world.merge()"),
    ],
)
def test_a_call_that_only_rank_0_makes_is_named(
    launcher: str, how: str, call: str, tmp_path: Path
) -> None:
    """Under the default timeouts, which are longer than the test's limit."""
    ended = run_by(launcher, *SCRIPT, how, folder=tmp_path)
    assert ended.status in (1, 2), ended.text
    said = re.escape(f"rank 0 waits in {call}, but rank 1 ")
    assert re.search(said, ended.text), ended.text
    if launcher == "paceline":
        assert ended.status == 2
        assert len(re.findall(said, ended.text)) == 1


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("preview", "rank 0 has reached the begin of the loader's epoch, but rank 1 "),
        ("break", "rank 0 has reached the begin of the loader's epoch, but rank 1 "),
        ("skip", "rank 0 made step 2 while rank 1 made step 1: "),
        ("samples", "rank 0 has reached world.step(samples=…), but rank 1 "),
        ("stream-break", "rank 0 has reached the begin of the loader's epoch, but rank 1 "),
        ("stream-skip", "rank 0 has reached the loader's next batch, but rank 1 "),
    ],
)
def test_a_loop_that_rank_0_alone_changes_is_named(how: str, said: str, tmp_path: Path) -> None:
    """A preview, an early stop, a batch that is skipped where its loss is NaN.

    As in pytorch/audio#3749, OpenBMB/BMTrain#108 and Lightning-AI/pytorch-lightning#5243. The sums
    of such a loop met those of a step, of another size, for which Gloo aborts the process; or the
    ranks went back to the same batches for ever.
    """
    ended = run_by("paceline", *SCRIPT, how, folder=tmp_path)
    assert ended.status == 2, ended.text
    assert ended.text.count(said) == 1, ended.text
    assert "continue" not in ended.text.replace("`continue`", "")


@pytest.mark.parametrize("how", ["plain", "peek"])
def test_an_evaluation_of_rank_0s_part_alone_is_named(how: str, tmp_path: Path) -> None:
    ended = run_by("paceline", *SCRIPT, how, folder=tmp_path)
    assert ended.status == 0, ended.text
    assert ended.text.count("rank 0 evaluated without rank 1") == (how == "plain")
