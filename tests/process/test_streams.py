"""Streams that end unevenly train as plain torch on the ranks' batches together, and resume."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.processes.command import Result
from tests.harness.processes.launcher_commands import run

SCRIPT = ("-m", "tests.harness.library.streams")
LINE = r"^rank (\d): (\d+) steps, counts \[(.*)\], (\S+), (\S+)$"


def lines_of(ended: Result) -> dict[int, tuple[int, list[int], float, str]]:
    """Read each rank's steps, numbers of samples, error and sum of the weights."""
    assert ended.status == 0, ended.text
    return {
        int(rank): (int(steps), [int(count) for count in counts.split(",")], float(error), weights)
        for rank, steps, counts, error, weights in re.findall(LINE, ended.text, re.M)
    }


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ("", ([4, 4, 4, 4, 4, 1], [4, 4, 1, 0, 0, 0], [4, 4, 4, 2, 0, 0])),
        ("--sync notified", ([4, 4, 4, 4, 4, 1], [4, 4, 1, 0, 0, 0], [4, 4, 4, 2, 0, 0])),
        ("--num_workers 2", ([4, 4, 4, 4, 3, 2], [4, 4, 1, 0, 0, 0], [4, 4, 3, 3, 0, 0])),
        ("--uneven shortest", ([4, 4, 4], [4, 4, 1], [4, 4, 4])),
    ],
)
def test_streams_of_other_lengths_train_as_in_plain_torch(
    tmp_path: Path, options: str, counts: tuple[list[int], ...]
) -> None:
    found = lines_of(run("paceline", *SCRIPT, *options.split(), folder=tmp_path, ranks=3))
    for rank, expected in enumerate(counts):
        steps, seen, error, _ = found[rank]
        assert (steps, seen) == (3 * len(expected), 3 * expected)
        assert error < 1e-10


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[int, list[int], float, str]]:
    """The lines of a run that nobody kills, whose model draws random numbers."""
    folder = tmp_path_factory.mktemp("noisy")
    return lines_of(run("paceline", *SCRIPT, "--noisy", folder=folder, ranks=3))


@pytest.mark.parametrize("died_before", [9, 11, 12])  # in an epoch of six steps, and at its end
def test_a_killed_run_reads_its_streams_up_to_the_position(
    tmp_path: Path, noisy: dict[int, tuple[int, list[int], float, str]], died_before: int
) -> None:
    words = (*SCRIPT, "run", "--noisy")
    killed = run("paceline", *words, "--die_before", str(died_before), folder=tmp_path, ranks=3)
    assert "was killed by SIGKILL" in killed.text
    resumed = lines_of(run("paceline", *words, folder=tmp_path, ranks=3))
    assert len(resumed[0][1]) < len(noisy[0][1])
    assert {rank: line[::3] for rank, line in resumed.items()} == {
        rank: line[::3] for rank, line in noisy.items()
    }


def test_a_resume_within_an_epoch_of_other_streams_is_refused(tmp_path: Path) -> None:
    words = (*SCRIPT, "run", "--uneven")
    run("paceline", *words, "join", "--die_before", "9", folder=tmp_path, ranks=3)
    other = run("paceline", *words, "shortest", folder=tmp_path, ranks=3)
    assert other.status == 2, other.text
    assert "uneven is shortest, but was join when the checkpoint was written" in other.text
    fewer = run("paceline", *words, "join", folder=tmp_path, ranks=2)
    assert "batch_size is 8, but was 12" in fewer.text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stream_that_is_empty_after_a_resume_is_refused(tmp_path: Path, rank: int) -> None:
    words = (*SCRIPT, "run")
    stopped = run("paceline", *words, "--stop_before", "7", folder=tmp_path, ranks=3)
    assert stopped.status == 143, stopped.text
    ended = run("paceline", *words, "--empty", str(rank), folder=tmp_path, ranks=3)
    assert ended.status == 2, ended.text
    sentence = f"rank {rank}'s stream has no batch in epoch 1, which the checkpoint has begun: pass"
    assert ended.text.count(sentence) == 1, ended.text
    assert "Traceback" not in ended.text
    whole = lines_of(run("paceline", *words, folder=tmp_path, ranks=3))
    assert {steps for steps, *_ in whole.values()} == {18}
