"""Parameter servers with stale workers, as processes: they train, end, resume and lose some.

Weights depend on the workers' speeds, so that no other run has the same. What must hold is that
each sample is trained once, and that all workers have the same weights where they are saved.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import ledger
from tests.harness.processes.command import Command, Result, all_end, run
from tests.harness.processes.fault_runs import FIRST_KILL, FaultRun, distance, load, requires_exact
from tests.harness.processes.run_folders import events, write_net

SERVED = ("--sync", "server", "--num_servers", "2", "--bucket_mb", "0.01")
STALE = (*SERVED, "--staleness", "2")
ASYNCHRONOUS = (*SERVED, "--staleness", "async", "--staleness_lr", "scale")


def requires_trained(stale: FaultRun, ended: Result) -> None:
    """Require an exact ledger, equal weights of all workers, and that no process is left."""
    assert ended.status == 0, ended.text
    assert "Traceback" not in ended.text
    requires_exact(stale)
    first, *others = (stale.weights_of(rank) for rank in stale.completed())
    for other in others:
        assert distance(first, other) == 0
    assert all_end(stale.servers())


def steps(stale: FaultRun, rank: int) -> list[dict[str, Any]]:
    """Return a worker's events of its steps."""
    return [event for event in events(stale.run_folder, rank) if event["event"] == "step"]


@pytest.mark.timeout(300)
def test_workers_with_staleness_train_each_sample_once_and_end_with_equal_weights(
    tmp_path: Path,
) -> None:
    stale = FaultRun(tmp_path, *STALE, machines=(3,))
    stale.reach(FIRST_KILL)
    stale.release()
    ended = stale.wait()
    assert stale.completed() == [0, 1, 2]
    requires_trained(stale, ended)
    lines = re.findall(r"epoch \d/5: .* staleness (?:[012]: \d+%, )+lr", ended.text)
    assert len(lines) == 5, ended.text
    behind = [event["staleness"] for rank in range(3) for event in steps(stale, rank)]
    assert len(behind) == 3 * 30
    assert 0 < max(behind) <= 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("words", [STALE, ASYNCHRONOUS], ids=["bounded", "asynchronous"])
def test_a_signal_saves_the_state_and_the_same_command_resumes(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    stale = FaultRun(tmp_path, *words, machines=(2,))
    stale.reach(FIRST_KILL)
    stale.interrupt()
    stale.release()
    ended = stale.wait()
    assert ended.status == 130, ended.text
    assert " is saved in runs/r, and the same command resumes it." in ended.text
    assert all_end(stale.servers())
    again = stale.again()
    assert again.status == 0, again.text
    requires_exact(stale)


def requires_bound(stale: FaultRun, ended: Result) -> None:
    """Require a line with a bound of the steps that are trained again, which no worker passes."""
    (bound,) = re.findall(r"; at most (\d+) steps? are trained again\.", ended.text)
    for rank in range(stale.count):
        again = [
            event["steps"]
            for event in events(stale.run_folder, rank)
            if event["event"] == "recovery"
        ]
        assert all(count <= int(bound) for count in again), (again, ended.text)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("words", "lost"), [(STALE, 2), (ASYNCHRONOUS, 0)], ids=["bounded", "asynchronous"]
)
def test_the_others_continue_where_a_worker_is_killed(
    tmp_path: Path, words: tuple[str, ...], lost: int
) -> None:
    stale = FaultRun(tmp_path, *words, machines=(3,))
    stale.reach(FIRST_KILL)
    stale.kill(lost)
    stale.release()
    ended = stale.wait()
    assert stale.completed() == [rank for rank in range(3) if rank != lost]
    requires_trained(stale, ended)
    requires_bound(stale, ended)
    lines = re.findall(r"epoch \d/5: .* staleness (?:\d+: \d+%, )+lr", ended.text)
    assert len(lines) == 5, ended.text


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("words", "lost", "owned"),
    [
        (ASYNCHRONOUS, (0,), "by 1 server from now on."),
        (STALE, (0, 1), "by the workers from now on, without staleness."),
        (ASYNCHRONOUS, (0, 1), "by the workers from now on, without staleness."),
    ],
    ids=["asynchronous-one", "bounded-all", "asynchronous-all"],
)
def test_the_workers_continue_without_servers_that_are_killed(
    tmp_path: Path, words: tuple[str, ...], lost: tuple[int, ...], owned: str
) -> None:
    stale = FaultRun(tmp_path, *words, machines=(2,))
    stale.reach(FIRST_KILL)
    for number in lost:
        stale.servers()[number].kill()
    stale.release()
    ended = stale.wait()
    assert f": all parameters are owned {owned}" in ended.text
    assert stale.completed() == [0, 1]
    requires_trained(stale, ended)


@pytest.mark.timeout(300)
def test_a_run_of_which_all_workers_are_killed_resumes(tmp_path: Path) -> None:
    stale = FaultRun(tmp_path, *ASYNCHRONOUS, machines=(2,))
    stale.reach(FIRST_KILL)
    stale.reach_checkpoint()
    stale.kill(0, 1)
    assert stale.wait().status == 1
    assert all_end(stale.servers())
    stale.release()
    again = stale.again()
    assert again.status == 0, again.text
    requires_exact(stale)


MODES = {
    "synchronous": (SERVED, "--sync server --staleness 0"),
    "bounded": (STALE, "--sync server --staleness 2"),
    "notified": (("--sync", "notified"), "--sync notified"),
    "asynchronous": (ASYNCHRONOUS, "--sync server --staleness async"),
    "average": (("--sync", "average", "--average_every", "2"), ""),
}
TRAIN = (
    *("train", "--train_data", "null", "--epoch_size", "18", "--image_size", "32"),
    *("--augment", "none", "--num_labels", "3", "--batch_size", "6", "--num_workers", "2"),
    *("--model", "net:plain", "--decode_workers", "0"),
)


@pytest.mark.timeout(300)
def test_a_run_starts_from_the_checkpoint_of_another_mode_and_says_what_becomes_of_momenta(
    tmp_path: Path,
) -> None:
    write_net(tmp_path)
    former = ""
    for number, (mode, (words, name)) in enumerate(MODES.items(), start=1):
        start: tuple[str, ...] = ()
        if number > 1:
            (checkpoint,) = (tmp_path / "runs" / str(number - 1) / "checkpoints").glob("step*.pt")
            start = ("--resume", str(checkpoint))
        epochs = ("--num_epochs", str(number), "--run_id", str(number))
        ended = run(*TRAIN, *epochs, *words, *start, folder=tmp_path)
        assert ended.status == 0, (mode, ended.text)
        if number > 1 and name:
            said = (
                f"The checkpoint is of a run with {former}, and this one has {name}: it continues"
            )
            assert said in ended.text
        if mode == "average":
            assert "and each with its momenta." in ended.text
        former = name


MEASURED = (
    *("train", "--train_data", "null", "--image_size", "32", "--augment", "none", "--num_labels"),
    *("3", "--run_id", "r", "--model", "net:slow", "--num_workers", "2", "--use_cpu"),
    *("--batch_size", "24", "--epoch_size", "610", "--num_epochs", "2"),
    *("--sync", "server", "--num_servers", "1"),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words",
    [("--staleness", "2", "--shares", "measured"), ("--staleness", "async")],
    ids=["bounded", "asynchronous"],
)
def test_a_slow_worker_trains_fewer_samples_where_shares_are_measured(
    tmp_path: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    write_net(tmp_path)
    (tmp_path / "slow").write_text("1 10")
    ended = run(*MEASURED, *words, folder=tmp_path)
    assert ended.status == 0, ended.text
    assert ledger.main([str(tmp_path / "runs/r"), "--json"]) == 0
    for account in json.loads(capsys.readouterr().out)["accounts"]:
        assert account["lost"] == account["twice"] == 0
    cuts, others = (
        [event["cuts"] for event in events(tmp_path / "runs/r", rank) if event["event"] == "step"]
        for rank in range(2)
    )
    assert cuts == others  # all ranks decided alike
    begin, between, end = cuts[-2]  # of a full batch
    assert end - between < 0.5 * (between - begin)


SCRIPT = """
import sys
import torch
from torch import nn
import paceline

torch.manual_seed(0)
samples, labels = torch.randn(48, 6), torch.randint(3, (48,))
world = paceline.join(run=None)
model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
paceline.parallelize(model, optimizer, world, sync=sys.argv[1])
data = torch.utils.data.TensorDataset(samples, labels)
loader = paceline.loader(data, batch_size=12, world=world, seed=1)
steps = 0
for epoch in range(3):
    for x, y in loader:
        steps += 1
        model[0].bias.requires_grad_(steps > 6)  # in the middle of an epoch
        with world.step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
world.settle()
torch.save(model.state_dict(), f"{sys.argv[2]}.{world.rank}.pt")
print("reads", sum(world.staleness.values()))
world.close()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sync", ["server:staleness=2", "server:staleness=async"])
def test_a_script_with_stale_workers_ends_an_epoch_with_equal_weights(
    tmp_path: Path, sync: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ("launch", "-n", "2", "--num_servers", "1", "--", sys.executable, "script.py")
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = Command(*words, sync, "end", folder=tmp_path, environment=environment).wait()
    assert ended.status == 0, ended.text
    first, second = (load(tmp_path / f"end.{rank}.pt") for rank in range(2))
    assert distance(first, second) == 0
    assert len(re.findall(r"reads [1-9]", ended.text)) == 2


def test_asynchronous_workers_that_count_their_samples_merge_after_a_break(tmp_path: Path) -> None:
    step = "        steps += 1\n"
    script = SCRIPT.replace(step, step + "        if steps % 4 == 3:\n            break\n")
    script = script.replace("world.settle()", "world.merge()")
    script = script.replace("world.step()", "world.step(samples=len(x))")
    (tmp_path / "script.py").write_text(script)
    words = ("launch", "-n", "2", "--num_servers", "1", "--", sys.executable, "script.py")
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    sync = "server:staleness=async"
    ended = Command(*words, sync, "end", folder=tmp_path, environment=environment).wait()
    assert ended.status == 0, ended.text
    first, second = (load(tmp_path / f"end.{rank}.pt") for rank in range(2))
    assert distance(first, second) == 0


@pytest.mark.parametrize(
    ("sync", "rank", "step"),
    [
        ("server:staleness=async", 0, 3),
        ("server:staleness=async", 1, 5),  # the first of an epoch, which a barrier begins
        ("server:staleness=2", 1, 3),
    ],
)
def test_a_break_on_one_rank_alone_is_a_sentence(
    tmp_path: Path, sync: str, rank: int, step: int
) -> None:
    counted = "        steps += 1\n"
    leaves = f"        if world.rank == {rank} and steps == {step}:\n            break\n"
    (tmp_path / "script.py").write_text(SCRIPT.replace(counted, counted + leaves))
    words = ("launch", "-n", "2", "--num_servers", "1", "--timeout", "20", "--", sys.executable)
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = Command(*words, "script.py", sync, "end", folder=tmp_path, environment=environment)
    ended = command.wait()
    assert ended.status == 2, ended.text
    assert "the begin of the loader's epoch" in ended.text
    assert ": all ranks must make the same calls in the same order." in ended.text
    assert "Traceback" not in ended.text
