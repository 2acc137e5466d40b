"""The epochs of a loop over the library's loader: where they are, and what of them is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline import ConfigError
from paceline.cli.ledger import main as ledger
from tests.harness.library.small_training import BATCH, SEED, loss_of, network, samples, sgd
from tests.harness.processes.run_folders import events


def test_the_ledger_has_each_sample_once_with_accumulation_too(tmp_path: Path) -> None:
    with paceline.join(tmp_path / "run") as world:
        model = network()
        optimizer = sgd(model)
        paceline.parallelize(model, optimizer, world)
        loader = paceline.loader(samples(), BATCH, world)
        for x, y in loader:
            if loader.step % 2 == 0 and loader.step + 1 < len(loader):
                with world.no_sync():
                    loss_of(model, x, y).backward()
                continue
            with world.step():
                loss_of(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
    lines = events(tmp_path / "run")
    taken = sorted((line["first"], line["last"]) for line in lines if line["event"] == "step")
    assert taken == [(0, 12), (12, 24), (24, 36), (36, 48), (48, 50)]


def test_the_epoch_is_told_before_during_and_after(tmp_path: Path) -> None:
    with paceline.join() as world:
        model = network()
        optimizer = sgd(model)
        paceline.parallelize(model, optimizer, world)
        loader = paceline.loader(samples(), BATCH, world)
        seen = []
        while loader.epoch < 2:
            seen.append(loader.epoch)
            for x, y in loader:
                with world.step():
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append(world.epoch)
        assert seen == [0] * 6 + [1] * 6
        for _ in loader:
            assert loader.epoch == 2
            break
        assert loader.epoch == 2  # nothing was trained


def test_an_epoch_that_is_broken_off_is_over_and_its_rest_counts_as_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with paceline.join(tmp_path / "run") as world:
        model = network()
        optimizer = sgd(model)
        paceline.parallelize(model, optimizer, world)
        loader = paceline.loader(samples(), BATCH, world)
        for epoch in range(2):
            for x, y in loader:
                with world.step():
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if (epoch, loader.step) == (0, 2):
                    break
            assert loader.epoch == epoch + 1
    lines = events(tmp_path / "run")
    taken = [(e["epoch"], e["first"], e["last"]) for e in lines if e["event"] == "step"]
    whole = [(0, 12), (12, 24), (24, 36), (36, 48), (48, 50)]
    assert taken == [(0, *share) for share in whole[:3]] + [(1, *share) for share in whole]
    assert ledger([str(tmp_path / "run")]) == 1
    assert (
        "Not exact: 14 samples were lost, 0 were duplicated or misplaced."
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("shuffle", [False, True])
def test_drop_last_leaves_out_the_short_batch_of_each_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shuffle: bool
) -> None:
    seen: list[set[tuple[float, ...]]] = []
    with paceline.join(tmp_path / "run", seed=SEED) as world:
        model = network()
        optimizer = sgd(model)
        paceline.parallelize(model, optimizer, world)
        loader = paceline.loader(samples(), BATCH, world, drop_last=True, shuffle=shuffle)
        assert (len(loader), loader.samples) == (4, 48)
        for _ in range(2):
            seen.append(set())
            for x, y in loader:
                assert len(x) == loader.count == BATCH
                seen[-1].update(tuple(row) for row in x.tolist())
                with world.step():
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
    assert [len(rows) for rows in seen] == [48, 48]
    assert (seen[0] == seen[1]) is not shuffle  # other samples are left out
    (start,) = [line for line in events(tmp_path / "run") if line["event"] == "run"]
    assert (start["samples"], start["steps"], start["batch"]) == (48, 4, BATCH)
    assert ledger([str(tmp_path / "run")]) == 0
    assert "in 8 steps, all committed" in capsys.readouterr().out


@pytest.mark.parametrize("train", [True, False])
def test_a_data_set_whose_length_changes_between_epochs_is_refused(train: bool) -> None:
    with paceline.join() as world:
        model = network()
        optimizer = sgd(model)
        paceline.parallelize(model, optimizer, world)
        data = list(samples())
        loader = paceline.loader(data, BATCH, world, train=train)
        for x, y in loader:
            if train:
                with world.step():
                    loss_of(model, x, y).backward()
                    optimizer.step()
        data.append(data[0])
        with pytest.raises(ConfigError, match="list has 51 samples, but had 50 when its loader"):
            next(iter(loader))
        if not train:
            assert len(paceline.loader(data, 51, world, train=False)) == 1


def test_drop_last_of_less_than_a_batch() -> None:
    with (
        paceline.join() as world,
        pytest.raises(ConfigError, match="drop_last leaves no batch of a data set of 5 samples"),
    ):
        paceline.loader(samples(5), BATCH, world, drop_last=True)


def test_a_resumed_run_with_another_drop_last(tmp_path: Path) -> None:
    def train(*, drop_last: bool) -> None:
        with paceline.join(tmp_path / "run") as world:
            model = network()
            optimizer = sgd(model)
            paceline.parallelize(model, optimizer, world)
            for x, y in paceline.loader(samples(), BATCH, world, drop_last=drop_last):
                with world.step():
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()

    train(drop_last=False)
    with pytest.raises(ConfigError, match="drop_last is True, but was False"):
        train(drop_last=True)
