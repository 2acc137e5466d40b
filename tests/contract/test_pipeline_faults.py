"""Pipelines that lose a stage: waits end, and name the rank that is missing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.config.world import SyncConfig
from paceline.errors import CommTimeout, ConfigError, PeerLost
from paceline.generation.run import Run
from tests.harness.equivalence.pipelines import Connections, PipelineRank, ThreadContext, on_ranks

X = torch.randn(8, 4)
Y = torch.randint(0, 2, (8,))
OPTIONS = {"microbatches": 4, "cuts": ["1"]}


MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


class Twice(nn.Module):
    """Returns its input in two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, -x


TWO = nn.Sequential(*MODEL, Twice())


class Fails(Exception):
    """What ends a stage."""


def train(rank: PipelineRank, loss: Any, batches: int = 1) -> None:
    """Train some batches in one step each."""
    stage = rank.cut(MODEL, loss, **OPTIONS)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    replica = rank.bind(stage, optimizer, SyncConfig(sync="allreduce"))
    for number in range(batches):
        with rank.run.timeline.span("step", step=number):
            replica.begin(number, 1.0)
            stage.train_batch(X, Y)
            optimizer.step()
            optimizer.zero_grad()
            replica.end()
    replica.close()


@pytest.mark.parametrize("calls", [1, 3, 6])
def test_a_stage_that_ends_in_mid_batch_is_named(calls: int) -> None:
    made: list[int] = []

    def fails(output: Any, labels: Any) -> Any:
        made.append(1)
        if len(made) == calls:
            raise Fails
        return F.cross_entropy(output, labels)

    def run(rank: PipelineRank) -> str:
        try:
            train(rank, fails, batches=2)
        except Fails:
            rank.run.context.abort()
            return ""
        except PeerLost as error:
            return str(error)
        return "no loss"

    sentence, _ = on_ranks(run, 2)
    assert sentence.startswith("rank 0 lost rank 1 in ")
    assert "microbatch" in sentence or "the end of the batch" in sentence
    assert f" in step {calls // 5}: " in sentence


def test_a_silent_stage_is_named_at_the_limit() -> None:
    over = threading.Event()

    def silent(output: Any, labels: Any) -> Any:
        over.wait(20)
        raise Fails

    def run(rank: PipelineRank) -> str:
        rank.run.context.limits = (0.2, 0.2)
        try:
            train(rank, silent)
        except CommTimeout as error:
            over.set()
            return str(error)
        except Fails:
            return ""
        return "no error"

    sentence, _ = on_ranks(run, 2)
    assert "rank 0 waited 0.2 s for rank 1 (stage 1) in " in sentence
    assert " in step 0: " in sentence


def test_waits_end_with_the_generation() -> None:
    waiting = threading.Event()
    over = threading.Event()

    def silent(output: Any, labels: Any) -> Any:
        waiting.set()
        over.wait(20)
        raise Fails

    def run(rank: PipelineRank) -> str:
        if rank.run.leads:
            threading.Thread(target=interrupt, args=(rank.run,)).start()
        try:
            train(rank, silent)
        except PeerLost as error:
            over.set()
            return error.cause
        except Fails:
            return ""
        return "no error"

    def interrupt(run: Run) -> None:
        waiting.wait(20)
        run.context.interrupt()

    cause, _ = on_ranks(run, 2)
    assert cause == "this process closed the connection"


def test_another_generation_has_a_link_of_its_own() -> None:
    """A late put of a stopped stage reaches nothing that the next generation reads."""
    connections = Connections()
    losses: dict[tuple[int, int], list[float]] = {}

    def run(rank: PipelineRank) -> None:
        stage = rank.cut(MODEL, F.cross_entropy, **OPTIONS)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.0)
        replica = rank.bind(stage, optimizer, SyncConfig(sync="allreduce"))
        own = rank.run.context
        for generation in range(2):
            if generation:
                context = ThreadContext(connections, own.world, own.mesh)
                rank.run.context = context.open(connections.connect)
                own.abort()
            with replica.no_sync():
                loss = stage.train_batch(X, Y)
            losses.setdefault((own.world.rank, generation), []).append(loss.item())
        replica.close()

    on_ranks(run, 2)
    expected = F.cross_entropy(MODEL(X), Y).item()
    assert len(losses) == 4
    for found in losses.values():
        assert found == pytest.approx([expected], abs=1e-6)


@pytest.mark.parametrize("tensors", [1, 2])
def test_an_evaluation_that_is_undone_ends_in_no_number_where_the_other_stage_has_left(
    tensors: int,
) -> None:
    def run(rank: PipelineRank) -> list[Any]:
        rank.sync.continues = True
        stage = rank.cut(MODEL if tensors == 1 else TWO, F.cross_entropy, **OPTIONS)
        found = [stage(X)]
        if not rank.run.leads:  # it has learned of a loss before
            rank.run.context.abort()
        return [*found, stage(X), stage(X[:3])]

    for whole, *lost in on_ranks(run, 2):
        assert isinstance(whole, Tensor if tensors == 1 else tuple)
        for output, rows in zip(lost, (8, 3), strict=True):
            for one in [output] if tensors == 1 else output:
                assert one.shape == (rows, 2)
                assert one.isnan().all()
            assert tensors == 1 or len(output) == 2


def test_the_output_of_an_evaluation_has_no_backward_but_may_be_written() -> None:
    def run(rank: PipelineRank) -> str:
        output = rank.cut(MODEL, F.cross_entropy, **OPTIONS)(X)
        output += 1
        with pytest.raises(ConfigError) as refused:
            F.cross_entropy(output, Y).backward()
        return str(refused.value)

    for sentence in on_ranks(run, 2):
        assert "Call model.train_batch(x, y) in place of forward, loss and backward." in sentence
