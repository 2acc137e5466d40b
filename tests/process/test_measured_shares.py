"""Workers of unlike speed: shares follow the speeds, and the result is that of one process."""

from __future__ import annotations

import json
import re
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli import ledger
from paceline.state.checkpoint_files import Checkpoints, read_checkpoint
from tests.harness.equivalence.large_batch import largest_difference
from tests.harness.library.measured_shares import (
    BATCH,
    CASES,
    MISTAKES,
    TESTED,
    mistakes,
    train_all,
    train_twice,
)
from tests.harness.library.small_training import samples
from tests.harness.network.ports import free_ports
from tests.harness.processes.command import Command, run
from tests.harness.processes.gloo_processes import spawn
from tests.harness.processes.run_folders import events, wait_until_step, write_net

TRAIN = (
    *("train", "--train_data", "null", "--image_size", "32", "--augment", "none", "--num_labels"),
    *("3", "--run_id", "r", "--model", "net:slow", "--num_workers", "2", "--use_cpu"),
    *("--batch_size", "24", "--epoch_size", "610"),  # 26 steps, the last one short
)


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    """All cases' models and counts, a rank each."""
    return spawn(3, train_all, free_ports(len(CASES)))


@pytest.mark.parametrize("name", CASES)
def test_a_loop_with_a_slow_rank_trains_as_plain_torch_does(
    name: str, trained: list[dict[str, Any]]
) -> None:
    expected, counts = CASES[name].alone(), trained[0][name][1]
    for rank in trained:
        state, own, _ = rank[name]
        assert largest_difference(state, expected) < 1e-10
        assert own == counts
    full = [step for step in counts if sum(step) == BATCH]
    assert max(full[0]) - min(full[0]) <= 1
    slow, *others = full[-1]
    assert slow < 0.75 * min(others)  # rank 0 loads samples in four times the time


@pytest.mark.parametrize("name", CASES)
def test_an_evaluation_is_divided_by_the_shares(name: str, trained: list[dict[str, Any]]) -> None:
    inputs = [rank[name][2] for rank in trained]
    for at, parts in zip((0, BATCH), zip(*inputs, strict=True), strict=True):
        expected, _ = samples(TESTED)[torch.arange(TESTED)[at : at + BATCH]]
        assert torch.equal(torch.cat(parts), expected)
        slow, *others = map(len, parts)
        assert slow < 0.75 * min(others)


def sentences() -> dict[str, str]:
    return {
        "counts itself": r"world\.step\(samples=3\) was called with shares='measured', .*: call "
        r"world\.step\(\) for the batches of paceline\.loader\(\), or pass shares='equal' to .*",
        "no loader": r"shares is 'measured', but there is no paceline\.loader\(\) of a map-style "
        r"data set, .*: create one before the first step, or pass shares='equal' .*",
        "a short batch": r"the batches accumulated in the step that ends at position \d+ divide "
        r"their samples differently among the ranks, .*, or pass drop_last=True to paceline\.loader"
        r"\(\)\.",
        "models": r"shares is 'equal', but was 'measured' in an earlier call of paceline\."
        r"parallelize\(\): .*; pass the same\.",
    }


def test_what_cannot_have_measured_shares_is_a_sentence_on_all_ranks() -> None:
    for found in spawn(2, mistakes, free_ports(len(MISTAKES))):
        assert found.keys() == sentences().keys()
        for name, sentence in sentences().items():
            assert re.fullmatch(sentence, found[name]), found[name]


def test_a_loop_continues_with_the_shares_of_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "r"
    spawn(2, train_twice, free_ports(2), folder)
    resumed, equal = require_resumed(folder, capsys)
    assert resumed != equal


def test_a_trainer_with_a_slow_worker_is_exact_and_resumes_with_its_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_net(tmp_path)
    (tmp_path / "slow").write_text("1 10")
    words = (*TRAIN, "--sync", "notified", "--shares", "measured")
    first = Command(*words, "--num_epochs", "3", folder=tmp_path)
    line = first.line_with("shares: ")
    assert re.match(r"shares: \d+, \d+ of 24 samples from step \d+ on; rank 1 on machine 0", line)
    wait_until_step(tmp_path / "runs/r", 28, 0)
    first.send(signal.SIGTERM)
    assert first.wait().status == 143
    assert run(*words, "--num_epochs", "3", folder=tmp_path).status == 0
    require_resumed(tmp_path / "runs/r", capsys)


def require_resumed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[list[int], list[int]]:
    """Require an exact run of two starts, the second of which began with the first one's shares.

    Returns:
        the ranks' samples in the first full step of the second start, and in that of the first.
    """
    capsys.readouterr()
    assert ledger.main([str(folder), "--json"]) == 0
    for account in json.loads(capsys.readouterr().out)["accounts"]:
        assert account["lost"] == account["twice"] == 0
    lines = events(folder)
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["cuts"] for line in steps] == [
        line["cuts"] for line in events(folder, 1) if line["event"] == "step"
    ]
    equal = counts_of(steps[0])
    assert equal[0] == equal[1]
    began = steps[0]["generation"]
    decided = [line for line in lines if line["event"] == "speeds"]
    begun = next(
        line for line in steps if line["generation"] > began and sum(counts_of(line)) == sum(equal)
    )
    *_, expected = (
        line["shares"]
        for line in decided
        if line["generation"] == began and line["first"] <= begun["step"]
    )
    assert counts_of(begun) == expected
    newest, *_ = Checkpoints(folder, 2).newest_first()
    # The last decision may be about steps that follow the checkpoint.
    first, shares = read_checkpoint(newest)["position"]["shares"][-1]
    assert (first, list(shares)) == (decided[-1]["first"], decided[-1]["shares"])
    return counts_of(begun), equal


def counts_of(line: dict[str, Any]) -> list[int]:
    cuts = line["cuts"]
    return [end - begin for begin, end in pairwise(cuts)]


def test_equal_shares_name_the_slow_worker_once(tmp_path: Path) -> None:
    write_net(tmp_path)
    (tmp_path / "slow").write_text("0 10")
    ended = run(*TRAIN, "--num_epochs", "2", folder=tmp_path)
    assert ended.status == 0, ended.text
    found = re.findall(
        r"workers differ in speed: rank 0 on machine 0 \(.+\) needs \S+ ms a sample, and the "
        r"fastest \S+ ms\. With --shares measured, the slowest would compute for \S+ ms a "
        r"step instead of \S+ ms",
        ended.text,
    )
    assert len(found) == 1
