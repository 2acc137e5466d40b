"""Scripts of the library that are killed, stopped and hurt, and go on with the same command."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest
import torch

from paceline.cli.main import main
from paceline.observe.event_file import find_event_files, read_events
from paceline.observe.ledger import prove
from tests.harness.processes.command import Result, all_end
from tests.harness.processes.launcher_commands import Script, run
from tests.harness.processes.run_folders import events

SCRIPT = ("-m", "tests.harness.library.library_script")
EPOCHS, STEPS = 3, 5  # of the script


def losses(text: str) -> dict[int, str]:
    """Read what rank 0 printed of its steps."""
    return {int(step): loss for step, loss in re.findall(r"^step (\d+): (\S+)$", text, re.M)}


@pytest.fixture(scope="module", params=["allreduce", "notified"])
def sync(request: pytest.FixtureRequest) -> str:
    """The method."""
    return str(request.param)


@pytest.fixture(scope="module")
def whole(sync: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a run of two ranks that nobody stops."""
    folder = tmp_path_factory.mktemp("whole")
    ended = run("paceline", *SCRIPT, "", "--sync", sync, folder=folder)
    assert ended.status == 0, ended.text
    found = losses(ended.text)
    assert set(found) == set(range(EPOCHS * STEPS))
    return found


def started_again(folder: Path, sync: str) -> Result:
    return run("paceline", *SCRIPT, "run", "--sync", sync, folder=folder)


def test_a_run_killed_in_mid_epoch_goes_on_bit_for_bit(
    whole: dict[int, str], sync: str, tmp_path: Path
) -> None:
    for step in (3, 8):
        words = ("run", "--sync", sync, "--wait_at", str(step + 3))
        script = Script("paceline", *SCRIPT, *words, folder=tmp_path)
        line = script.line_with(f"step {step}:")
        script.kill_all()
        script.wait()
        assert losses(line)[step] == whole[step]
    ended = started_again(tmp_path, sync)
    assert ended.status == 0, ended.text
    found = losses(ended.text)
    assert found == {step: whole[step] for step in found}
    assert max(found) == EPOCHS * STEPS - 1
    assert_each_sample_once(tmp_path / "run")
    assert main(["ledger", str(tmp_path / "run")]) == 0


def assert_each_sample_once(run: Path) -> None:
    """Read the ranks' events: of each step the last generation's lines count."""
    shares: dict[tuple[int, int], tuple[int, int]] = {}
    for rank in (0, 1):
        for line in events(run, rank):
            if line["event"] == "restore":
                shares = {k: v for k, v in shares.items() if k[0] != rank or k[1] < line["step"]}
            if line["event"] == "step":
                shares[rank, line["step"]] = (line["first"], line["last"])
    for epoch in range(EPOCHS):
        seen = [
            position
            for (_, step), (first, last) in shares.items()
            if step // STEPS == epoch
            for position in range(first, last)
        ]
        assert sorted(seen) == list(range(50))


@pytest.mark.parametrize(
    ("launcher", "number", "status"),
    [
        ("paceline", signal.SIGTERM, 143),
        ("paceline", signal.SIGINT, 130),
        ("python", signal.SIGINT, 130),
    ],
)
def test_a_stopped_run_saves_and_goes_on(
    whole: dict[int, str],
    sync: str,
    tmp_path: Path,
    launcher: str,
    number: signal.Signals,
    status: int,
) -> None:
    words = (*SCRIPT, "run", "--epochs", "100000", "--sync", sync)
    script = Script(launcher, *words, folder=tmp_path)
    script.line_with("step 7:")
    family = psutil.Process(script.pid).children(recursive=True)
    script.send(number)
    ended = script.wait(limit=30)
    assert ended.status == status, ended.text
    assert "Traceback" not in ended.text
    assert all_end(family)
    assert ended.text.count(f"paceline: stopped by {number.name}") == 1
    newest = max((tmp_path / "run/checkpoints").glob("step-*.pt"))
    saved = torch.load(newest, weights_only=True)["position"]["number"]
    sentence = f": the state after {saved} steps is saved in run, and the same command resumes it."
    assert ended.text.count(sentence) == 1
    stopped_after = max([7, *losses(ended.text)])
    assert saved == stopped_after + 1  # nothing is lost
    if number == signal.SIGTERM:  # once is enough
        found = losses(started_again(tmp_path, sync).text)
        assert found == {step: whole[step] for step in range(saved, EPOCHS * STEPS)}


def test_a_signal_during_an_evaluation_keeps_the_epochs_end(tmp_path: Path) -> None:
    options = ("run", "--epochs", "1", "--evaluate_until_stopped")
    script = Script("python", *SCRIPT, *options, folder=tmp_path)
    script.line_with("step 4:")
    script.send(signal.SIGTERM)
    ended = script.wait(limit=30)
    assert ended.status == 143, ended.text
    assert "Traceback" not in ended.text
    assert (tmp_path / "run/checkpoints/step-00000005.pt").exists()


def test_without_a_run_ctrl_c_ends_quietly(tmp_path: Path) -> None:
    script = Script("python", *SCRIPT, "", "--epochs", "100000", folder=tmp_path)
    script.line_with("step 3:")
    script.send(signal.SIGINT)
    ended = script.wait(limit=30)
    assert ended.status == 130, ended.text
    assert "Traceback" not in ended.text
    assert "paceline" not in ended.text


def test_a_run_that_is_alive_is_not_joined_again(tmp_path: Path) -> None:
    script = Script("python", *SCRIPT, "run", "--epochs", "100000", folder=tmp_path)
    script.line_with("step 3:")
    second = run("python", *SCRIPT, "run", folder=tmp_path)
    script.kill_all()
    script.wait()
    assert second.status == 2
    assert re.fullmatch(
        r"paceline: run run: this run is active on this machine \(process \d+ on .*\); "
        r"end it with `paceline stop run`, or give another run.\n",
        second.text,
    )


@pytest.mark.parametrize(
    ("launcher", "told"),
    [
        ("paceline", r"paceline: rank 1 on machine 0 \(.*\): ended with status 7\.\n"),
        ("slurm", r"because rank 1 on machine 0 \(.*\) failed: ended with status 7\.\n"),
    ],
    ids=["paceline", "slurm"],
)
def test_a_rank_that_leaves_early_ends_the_others(tmp_path: Path, launcher: str, told: str) -> None:
    ended = run(launcher, *SCRIPT, "run", "--fail", "1:7:exit", "--steps", "0", folder=tmp_path)
    assert ended.status == 7, ended.text
    assert "Traceback" not in ended.text
    assert len(re.findall(told, ended.text)) == 1, ended.text
    assert "lost a peer" not in ended.text
    assert_rescued(tmp_path / "run", ended.text, at_least=5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bit_that_flips_on_one_rank_ends_the_run_and_isnt_saved(
    rank: int, sync: str, tmp_path: Path
) -> None:
    words = ("run", "--fail", f"{rank}:7:flip", "--sync", sync, "--steps", "3")
    ended = run("paceline", *SCRIPT, *words, folder=tmp_path)
    assert ended.status == 1, ended.text
    assert "Traceback" not in ended.text
    found = re.findall(
        r"the replicas differ after (\d+) steps: ranks 0 and 1 differ in 4\.bias(?:, and in .*)?; "
        r"in the last comparison, after (\d+) steps, they were equal\. Usual causes: ",
        ended.text,
    )
    assert len(found) == 1, ended.text
    differ, equal = map(int, found[0])
    assert equal <= 7 <= differ
    saved = saved_steps(ended.text)
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*.pt"))
    assert saved == [torch.load(newest, weights_only=True)["position"]["number"]]
    assert saved[0] <= 7
    again = started_again(tmp_path, sync)
    assert again.status == 0, again.text
    assert_each_sample_once(tmp_path / "run")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_that_one_rank_leaves_out_ends_the_run(
    rank: int, sync: str, tmp_path: Path
) -> None:
    words = ("run", "--fail", f"{rank}:7:skip", "--sync", sync, "--steps", "3")
    ended = run("paceline", *SCRIPT, *words, folder=tmp_path)
    assert ended.status == 2, ended.text
    assert "Traceback" not in ended.text
    sentence = f"in step 7 optimizer.step() was called on rank {1 - rank}, but not on rank {rank}: "
    assert ended.text.count(sentence) == 1, ended.text
    saved = saved_steps(ended.text)
    assert len(saved) == 1
    assert 3 <= saved[0] <= 6  # before the update that is missing


def saved_steps(text: str) -> list[int]:
    """Return the numbers of steps that lines say are saved."""
    return [int(steps) for steps in re.findall(r"the state after (\d+) steps is saved in", text)]


def assert_rescued(folder: Path, text: str, at_least: int) -> None:
    """Require that the newest state was saved, is named, and is committed in the ledger."""
    saved = saved_steps(text)
    newest = max((folder / "checkpoints").glob("step-*.pt"))
    assert saved == [torch.load(newest, weights_only=True)["position"]["number"]]
    assert saved[0] >= at_least
    files = find_event_files(folder)
    assert prove((member, read_events(path)) for member, path in files).committed == saved[0]


def test_a_rank_that_ends_well_in_mid_epoch_is_lost_to_the_others_at_once(
    sync: str, tmp_path: Path
) -> None:
    ended = run("paceline", *SCRIPT, "", "--fail", "1:7:leave", "--sync", sync, folder=tmp_path)
    assert ended.status == 1, ended.text
    assert "Traceback" not in ended.text
    cause = r"rank 1 on machine 0 \(.*\) closed its world after 7 steps and is missing from"
    name = r"rank 0 of generation 1 on machine 0 \(.*\)"  # which was decided, and not formed
    assert re.search(rf"paceline: {name}: {cause} the next step: ", ended.text)
    assert ended.text.endswith("must call world.step(samples=0).\n")


LEAVES_EARLY = """
import sys
import torch
import paceline

world = paceline.join(timeout=600)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
paceline.parallelize(model, optimizer, world, sync=sys.argv[1])
for _ in range(3 + (world.rank == 0)):
    with world.step(samples=2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_rank_that_made_fewer_steps_with_numbers_of_samples_is_named(
    sync: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(LEAVES_EARLY)
    ended = run("paceline", str(tmp_path / "script.py"), sync, folder=tmp_path)
    assert ended.status == 1, ended.text
    cause = r"rank 1 on machine 0 \(.*\) closed its world after 3 steps and is missing from"
    assert re.search(cause, ended.text), ended.text


def test_a_last_checkpoint_that_cannot_be_written_is_a_sentence_and_status_1(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").touch()  # where the folder must be
    ended = run("python", *SCRIPT, "run", "--epochs", "1", "--steps", "0", folder=tmp_path)
    assert ended.status == 1, ended.text
    assert "the checkpoint can't be written" in ended.text
    assert "give another run." in ended.text
    assert "Traceback" not in ended.text


CHECKPOINT_ALONE = """
import sys
import torch
import paceline

world = paceline.join("run", timeout=3, first_iter_timeout=10)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
paceline.parallelize(model, optimizer, world, sync="notified", update=sys.argv[1])
for number in range(6):
    with world.step():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if number == 3 and world.rank == 0:
        world.checkpoint()
    if number == 3 and world.rank == 1 and sys.argv[2] == "total":
        world.total(torch.ones(3))
"""
MUST_CALL = "rank 0 waits in world.checkpoint(), but rank 1 is in step "


@pytest.mark.parametrize(
    ("update", "other", "status", "expected"),
    [
        ("replicated", "step", 0, ""),
        ("sharded", "step", 2, MUST_CALL),
        ("sharded", "total", 2, "must make the same calls in the same order."),
    ],
    ids=str,
)
def test_rank_0_alone_saves_only_what_it_has(
    tmp_path: Path, update: str, other: str, status: int, expected: str
) -> None:
    (tmp_path / "script.py").write_text(CHECKPOINT_ALONE)
    ended = run("paceline", str(tmp_path / "script.py"), update, other, folder=tmp_path)
    assert ended.status == status, ended.text
    assert expected in ended.text
    assert "Traceback" not in ended.text
    if not status:
        assert (tmp_path / "run/checkpoints/step-00000004.pt").exists()
