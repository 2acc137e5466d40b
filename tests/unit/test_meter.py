"""Meters in a world of one rank; with lost ranks, see `process/test_random_kills.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import ConfigError

DATA = TensorDataset(torch.arange(10.0).unsqueeze(1))


class Loop:
    """A loop that has no step yet."""

    def __init__(self, run: Path | None = None) -> None:
        self.world = paceline.join(run)
        self.model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        paceline.parallelize(self.model, optimizer, self.world)
        self.optimizer = optimizer
        self.loader = paceline.loader(DATA, 4, self.world)
        self.test = paceline.loader(DATA, 4, self.world, train=False)

    def update(self, x: torch.Tensor) -> None:
        self.model(x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_sums_are_of_an_epoch_and_of_an_evaluation() -> None:
    loop = Loop()
    with loop.world:
        trained = loop.world.meter("total", "samples")
        held = loop.world.meter("total")
        for epoch in range(2):
            for (x,) in loop.loader:
                with loop.world.step():
                    loop.update(x)
                    trained.add(total=x.sum(), samples=len(x))
                    trained.add(samples=0)
            assert trained.sums() == {"total": 45.0, "samples": 10.0}
            for (x,) in loop.world.evaluation(loop.test):
                held.add(total=x.sum() * (epoch + 1))
            assert held.sums() == {"total": 45.0 * (epoch + 1)}
            assert trained.sums() == {"total": 45.0, "samples": 10.0}


def test_a_loss_that_has_its_graph_is_added_in_silence(recwarn: pytest.WarningsRecorder) -> None:
    loop = Loop()
    with loop.world:
        trained = loop.world.meter("loss")
        held = loop.world.meter("loss")
        for (x,) in loop.loader:
            with loop.world.step():
                trained.add(loss=loop.model(x).sum())
                loop.update(x)
        for (x,) in loop.world.evaluation(loop.test):
            held.add(loss=loop.model(x).sum())
        assert trained.sums()["loss"] == pytest.approx(held.sums()["loss"])
    assert [str(one.message) for one in recwarn if "requires_grad" in str(one.message)] == []


def test_batches_whose_gradients_accumulate_count_in_their_step() -> None:
    loop = Loop()
    with loop.world:
        meter = loop.world.meter("total")
        for (x,) in loop.loader:
            if loop.loader.step + 1 < len(loop.loader):
                with loop.world.no_sync():
                    loop.model(x).sum().backward()
                meter.add(total=x.sum())
                continue
            with loop.world.step():
                loop.update(x)
                meter.add(total=x.sum())
        assert meter.sums() == {"total": 45.0}


def test_a_resumed_run_continues_the_sums_of_its_epoch(tmp_path: Path) -> None:
    for resumed in (False, True):
        loop = Loop(tmp_path / "run")
        with loop.world:
            meter = loop.world.meter("samples")
            for (x,) in loop.loader:
                with loop.world.step():
                    loop.update(x)
                    meter.add(samples=len(x))
                if not resumed:
                    loop.world.checkpoint()
                    break
            if resumed:
                assert meter.sums() == {"samples": 10.0}


def test_other_meters_are_refused_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    with loop.world:
        meter = loop.world.meter("samples")
        for (x,) in loop.loader:
            with loop.world.step():
                loop.update(x)
                meter.add(samples=1)
            break
    loop = Loop(tmp_path / "run")
    loop.world.meter("loss")
    text = "^the meters have the sums loss, but the checkpoint, written in the middle of an epoch,"
    with loop.world, pytest.raises(ConfigError, match=text):
        next(iter(loop.loader))


def test_what_a_meter_refuses() -> None:
    loop = Loop()
    with loop.world:
        for names in ((), ("a", "a")):
            with pytest.raises(ConfigError, match=r"^world\.meter\(\) got the names"):
                loop.world.meter(*names)
        meter = loop.world.meter("total")
        with pytest.raises(ConfigError, match="was called outside a step"):
            meter.add(total=1)
        for (x,) in loop.loader:
            with loop.world.step():
                loop.update(x)
                meter.add(total=1)
                with pytest.raises(ConfigError, match=r"got samples=, but the meter has the sums"):
                    meter.add(samples=1)
                with pytest.raises(ConfigError, match=r"total= of type str: pass a number"):
                    meter.add(total="high")  # type: ignore[arg-type]
                with pytest.raises(ConfigError, match=r"of shape \(2,\): pass a number"):
                    meter.add(total=torch.ones(2))
                with pytest.raises(ConfigError, match="was called inside a step"):
                    meter.sums()
            with pytest.raises(ConfigError, match="was called outside a step"):
                meter.add(total=1)
        late = loop.world.meter("total")
        for _ in loop.world.evaluation(loop.test):
            late.add(total=1)
            with pytest.raises(ConfigError, match="before the end of the loop"):
                late.sums()
            with pytest.raises(ConfigError, match="both in a step and in an evaluation"):
                meter.add(total=1)
        assert late.sums() == {"total": 3.0}
        last = loop.world.meter("total")
        for (x,) in loop.loader:
            with loop.world.step():
                loop.update(x)
                with pytest.raises(ConfigError, match="the meter was made after the first step"):
                    last.add(total=1)
            break
