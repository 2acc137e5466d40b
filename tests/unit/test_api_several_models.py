"""Several models in one world: runs resume with all of them, batches count once."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline import ConfigError
from paceline.api.world import World
from paceline.cli import ledger
from tests.harness.library.gan import SAMPLES, Gan, train_in
from tests.harness.library.small_training import BATCH, samples, sgd

STEPS = 5
SHARDED = {"sync": "notified", "update": "sharded"}
GANS = {
    "one block": Gan(),
    "a block each": Gan(blocks=2),
    "a generator every second batch": Gan(every=2),
    "in a block of its own every second batch": Gan(blocks=2, every=2),
    "one call": Gan(together=True),
    "sharded": Gan(arguments=SHARDED),
}


class Killed(Exception):
    """The process came to its end here."""


def killed(run: Path, gan: Gan, at: int, where: str) -> None:
    """Train until the process is killed; return nothing of what it had in memory."""

    def act(world: World, name: str) -> None:
        if (world.steps, name) == (at, where):
            raise Killed

    with pytest.raises(Killed):
        train_in(run, gan, act, checkpoint_steps=2)
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()  # a killed process writes no more


@pytest.mark.parametrize(("at", "where"), [(3, "batch"), (6, "update"), (9, "backward")])
@pytest.mark.parametrize("name", GANS)
def test_a_killed_gan_resumes_bit_for_bit(tmp_path: Path, name: str, at: int, where: str) -> None:
    gan = GANS[name]
    expected, state = train_in(None, gan)
    killed(tmp_path / "run", gan, at, where)
    losses, resumed = train_in(tmp_path / "run", gan, checkpoint_steps=2)
    assert losses == {number: expected[number] for number in losses}
    assert set(losses) >= set(range(at, 3 * STEPS))
    assert state.keys() == resumed.keys()
    for key, value in state.items():
        assert torch.equal(value, resumed[key]), key


def test_a_killed_gan_resumes_between_the_blocks_of_a_batch(tmp_path: Path) -> None:
    gan = Gan(blocks=2)
    expected, state = train_in(None, gan)
    killed(tmp_path / "run", gan, 7, "between")  # the step has a number more there
    losses, resumed = train_in(tmp_path / "run", gan, checkpoint_steps=2)
    assert losses == {number: expected[number] for number in losses}
    assert min(losses) <= 6
    assert all(torch.equal(value, resumed[key]) for key, value in state.items())


def test_a_batch_of_two_blocks_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, _ = train_in(tmp_path / "run", Gan(blocks=2))
    assert list(losses) == [*range(3 * STEPS)]
    capsys.readouterr()
    assert ledger.main([str(tmp_path / "run"), "--json"]) == 0
    accounts = json.loads(capsys.readouterr().out)["accounts"]
    assert [one["once"] for one in accounts] == [SAMPLES] * 3


@pytest.mark.parametrize("name", ["one block", "one call", "sharded"])
def test_a_checkpoint_file_has_the_state_dicts_of_all(tmp_path: Path, name: str) -> None:
    gan = GANS[name]
    _, state = train_in(tmp_path / "run", gan)
    (newest, *_) = sorted((tmp_path / "run/checkpoints").glob("step-*.pt"))[::-1]
    saved = torch.load(newest, weights_only=True)
    if name == "one call":
        assert "model_2" not in saved
        entries = {
            **{f"judge.{key[2:]}": v for key, v in saved["model"].items() if key[0] == "0"},
            **{f"make.{key[2:]}": v for key, v in saved["model"].items() if key[0] == "1"},
        }
    else:
        entries = {
            **{f"judge.{key}": value for key, value in saved["model"].items()},
            **{f"make.{key}": value for key, value in saved["model_2"].items()},
        }
    assert entries.keys() == {key for key in state if key[:5] in ("make.", "judge")}
    assert all(torch.equal(value, state[key]) for key, value in entries.items())
    make, judge = gan.networks()
    opt_j = torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.9)
    opt_j.load_state_dict(saved["optimizer"])
    opt_m = torch.optim.Adam(make.parameters(), lr=0.01)
    opt_m.load_state_dict(saved["optimizer_2"])
    assert len(opt_j.state) == len(opt_m.state) == 6
    assert opt_m.param_groups[0]["lr"] == pytest.approx(0.01 * 0.98**15)


def test_a_resumed_script_with_fewer_models_is_refused(tmp_path: Path) -> None:
    train_in(tmp_path / "run", Gan())
    _, judge = Gan().networks()
    with paceline.join(tmp_path / "run") as world:
        optimizer = torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.9)
        paceline.parallelize(judge, optimizer, world)
        world.track(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98))
        loader = paceline.loader(samples(SAMPLES), BATCH, world)
        with pytest.raises(ConfigError, match=r"has the state of model_2, which isn't trained"):  # noqa: PT012
            for _ in loader:
                with world.step():
                    pass


def test_a_checkpoint_between_the_blocks_of_a_batch_is_made_after_the_last(tmp_path: Path) -> None:
    gan = Gan(blocks=2)
    expected, state = train_in(None, gan)

    def act(world: World, name: str) -> None:
        if (world.steps, name) == (4, "between"):
            world.checkpoint()
        if (world.steps, name) == (6, "backward"):
            raise Killed

    with pytest.raises(Killed):
        train_in(tmp_path / "run", gan, act, keep_checkpoints=9)
    files = [path.name for path in (tmp_path / "run/checkpoints").glob("step-*.pt")]
    assert "step-00000004.pt" in files
    losses, resumed = train_in(tmp_path / "run", gan)
    assert losses == {number: expected[number] for number in losses}
    assert all(torch.equal(value, resumed[key]) for key, value in state.items())


def test_a_second_block_of_one_model_is_refused(tmp_path: Path) -> None:
    make, _ = Gan().networks()
    with paceline.join() as world:
        optimizer = paceline.parallelize(make, sgd(make), world)[1]
        for _ in paceline.loader(samples(), BATCH, world):
            with world.step():
                optimizer.step()
            with pytest.raises(ConfigError, match="called without a batch"), world.step():
                pass
            break


def test_a_step_after_the_loop_over_the_loader_is_refused() -> None:
    make, judge = Gan().networks()
    with paceline.join() as world:
        for model in (make, judge):
            paceline.parallelize(model, sgd(model), world)
        for _ in paceline.loader(samples(), BATCH, world):
            with world.step():
                pass
        with pytest.raises(ConfigError, match="called without a batch"), world.step():
            pass


def test_what_parallelize_returns() -> None:
    make, judge = Gan().networks()
    models, optimizers = [make, judge], (sgd(make), sgd(judge))
    with paceline.join() as world:
        found = paceline.parallelize(models, optimizers, world)
        assert found[0] is models
        assert found[1] is optimizers


def test_a_model_that_is_frozen_for_a_step_is_not_bound_anew() -> None:
    make, judge = Gan(norm=False).networks()
    first, second = sgd(make), sgd(judge)
    with paceline.join() as world:
        for model, optimizer in ((make, first), (judge, second)):
            paceline.parallelize(model, optimizer, world)
        for number in range(6):
            judge.requires_grad_(number % 2 == 0)
            before = judge[0].weight.detach().clone()  # type: ignore[index]
            with world.step():
                judge(make(torch.ones(3, 4).double())).mean().backward()
                (second if number % 2 == 0 else first).step()
            assert torch.equal(before, judge[0].weight) is (number % 2 == 1)  # type: ignore[index]
        assert world._loop.replica is not None
        assert world._loop.replica.bindings == 2


def test_a_closed_world_leaves_plain_models() -> None:
    make, judge = Gan().networks()
    first, second = sgd(make), sgd(judge)
    with paceline.join() as world:
        paceline.parallelize([make, judge], [first, second], world)
    for thing in (make, judge, first, second):
        assert not {"step", "train", "zero_grad"} & vars(thing).keys()
    assert all(type(p) is nn.Parameter for p in make.parameters())
