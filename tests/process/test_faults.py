"""The fault suite: processes of `paceline train` are killed in mid-run, and the others continue."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from paceline.cli.main import main
from tests.harness.processes.command import Result, all_end, loss_of, rows_of
from tests.harness.processes.fault_replays import FaultReplays
from tests.harness.processes.fault_runs import (
    BATCH,
    EPOCH_SIZE,
    EXACT,
    FIRST_KILL,
    STEPS,
    FaultRun,
    distance,
    proof_of,
    requires_exact,
)

SYNCS = {
    "allreduce": ("--sync", "allreduce"),
    "replicated": ("--sync", "notified", "--update", "replicated", "--bucket_mb", "0.01"),
    "sharded": ("--sync", "notified", "--update", "sharded", "--bucket_mb", "0.01"),
}
DYING = ("--model", "tests.harness.processes.dying_net:dying")


class Undisturbed:
    """Trainings in which no process is lost: of one worker, and replays of the runs' cuts.

    Args:
        folders: makes a folder for each.
    """

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        run = FaultRun(folders.mktemp("alone"), *SYNCS["allreduce"], machines=(1,))
        run.release()
        ended = run.wait()
        assert ended.status == 0, ended.text
        self._alone, self._replays = run.weights(), FaultReplays(folders)

    def requires_weights(self, run: FaultRun, sync: str, *more: Mapping[str, Tensor]) -> None:
        """Require that a run has left a replay's weights, and those of one worker but for rounding.

        Args:
            run: has ended.
            sync: its exchange.
            more: further weights of which the same is required.
        """
        requires_exact(run)
        replayed = self._replays.weights(SYNCS[sync], (run.count,), run.changes())
        for weights in (run.weights(), *more):
            assert distance(weights, replayed) == 0
            assert distance(weights, self._alone) < EXACT

    def requires_trained(self, run: FaultRun, sync: str, continued: list[int]) -> None:
        """Require that these workers' processes, and no new ones, trained to these weights."""
        self.requires_weights(run, sync, *map(run.weights_of, continued))
        assert run.evaluated() <= set(run.pids.values())
        assert run.completed() == continued


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory)


def requires_reported(ended: Result, run: FaultRun, lost: tuple[int, ...]) -> None:
    """Require that a line names each lost worker, and one the processes that continue."""
    name = r"rank \d+(?: of generation \d+)? on machine 0 \(\S+\)"  # of two, one may be lost later
    assert len(set(re.findall(f"{name} was killed by SIGKILL", ended.text))) >= len(lost)
    left = run.count - len(lost)
    words = "process continues" if left == 1 else "processes continue"
    continued = rf"{loss_of(name)}\. {left} {words} from step "
    assert re.search(continued, ended.text), ended.text
    assert "Traceback" not in ended.text


@pytest.mark.parametrize(
    ("sync", "workers", "lost"),
    [
        ("sharded", 3, (0,)),
        ("allreduce", 4, (0, 2)),
        ("sharded", 4, (1, 3)),
        ("replicated", 3, (0, 1)),
    ],
    ids=str,
)
def test_the_others_continue_in_their_processes_where_workers_are_killed(
    tmp_path: Path, undisturbed: Undisturbed, sync: str, workers: int, lost: tuple[int, ...]
) -> None:
    run = FaultRun(tmp_path, *SYNCS[sync], machines=(workers,))
    run.reach(FIRST_KILL)
    run.kill(*lost)
    run.release()
    ended = run.wait()
    assert ended.status == 0, ended.text
    requires_reported(ended, run, lost)
    undisturbed.requires_trained(run, sync, [rank for rank in range(workers) if rank not in lost])
    assert [row["epoch"] for row in rows_of(run.run_folder)] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(("sync", "lost"), [("sharded", (0, 1)), ("sharded", (1, 2))], ids=str)
def test_a_run_that_lost_a_part_of_its_state_goes_back_to_its_checkpoint_in_its_process(
    tmp_path: Path, undisturbed: Undisturbed, sync: str, lost: tuple[int, ...]
) -> None:
    run = FaultRun(tmp_path, *SYNCS[sync])
    run.reach(FIRST_KILL)
    run.reach_checkpoint()
    run.kill(*lost)
    run.release()
    ended = run.wait()
    assert ended.status == 0, ended.text
    assert "With that, all copies of a part of the state are lost, and no snapshot" in ended.text
    assert "1 process continues from the durable state of step " in ended.text, ended.text
    back = re.search(
        r"The run went back from step (\d+) to step (\d+) of epoch \d, which is "
        r"(?:runs/r/checkpoints/step-0*(\d+).pt|the run's beginning): (\d+) samples are trained",
        ended.text,
    )
    assert back is not None, ended.text
    reached, start, file, samples = (int(group or 0) for group in back.groups())
    assert start == file
    assert start > 0 or 0 in lost  # then rank 0's last report may have been lost with it
    assert start % STEPS == 0
    assert trained(reached) - trained(start) == samples
    assert "Traceback" not in ended.text
    (left,) = {0, 1, 2} - {*lost}
    undisturbed.requires_trained(run, sync, [left])
    assert [row["epoch"] for row in rows_of(run.run_folder)] == ["0", "1", "2", "3", "4"]


def trained(step: int) -> int:
    """Return the number of samples of all steps before one."""
    return step // STEPS * EPOCH_SIZE + min(step % STEPS * BATCH, EPOCH_SIZE)


@pytest.mark.parametrize(
    ("sync", "deaths"),
    [
        ("allreduce", ("0 saving 1", "3 evaluation 3", "1 forward 23")),
        ("replicated", ("1 forward 7", "0 evaluation 2", "2 backward 20")),
        ("sharded", ("2 evaluation 1", "0 saving 3", "3 backward 19")),
    ],
    ids=str,
)
def test_the_others_continue_whenever_in_an_epoch_workers_die(
    tmp_path: Path, undisturbed: Undisturbed, sync: str, deaths: tuple[str, ...]
) -> None:
    (tmp_path / "deaths").write_text("\n".join(deaths))
    run = FaultRun(tmp_path, *SYNCS[sync], *DYING, "--checkpoint_steps", "3", machines=(4,))
    run.release()
    ended = run.wait()
    assert ended.status == 0, ended.text
    assert ended.text.count(" as generation ") == len(deaths)
    assert "Traceback" not in ended.text
    undisturbed.requires_weights(run, sync)
    assert len(run.evaluated()) <= run.count


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        (SYNCS["allreduce"], 1),
        (SYNCS["sharded"], 0),
        (("--sync", "average", "--average_every", "2"), 2),
    ],
    ids=["allreduce", "sharded", "average"],
)
def test_the_others_continue_where_a_worker_dies_before_the_first_step(
    tmp_path: Path, words: tuple[str, ...], lost: int
) -> None:
    (tmp_path / "deaths").write_text(f"{lost} snapshot 1")
    run = FaultRun(tmp_path, *words, *DYING, epochs=1)
    run.release()
    ended = run.wait()
    assert ended.status == 0, ended.text
    assert " as generation 1" in ended.text
    assert "The checkpoint is of a run that " not in ended.text  # there is none
    assert "Traceback" not in ended.text
    requires_exact(run)


def test_the_others_continue_where_workers_die_in_the_trials_of_autotuning(
    tmp_path: Path,
) -> None:
    (tmp_path / "deaths").write_text("1 forward 18\n0 forward 34")
    run = FaultRun(tmp_path, *DYING, "--epoch_size", "960", machines=(4,), epochs=3)
    run.release()
    ended = run.wait()
    assert ended.status == 0, ended.text
    starts, choice = run.starts(), ended.text.index("exchange: ")
    assert len(starts) == 2
    assert ended.text.rindex(" as generation ") < choice  # a world that changes begins them anew
    requires_exact(run)


def test_workers_train_to_the_end_without_their_supervisor(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    run = FaultRun(tmp_path, *SYNCS["sharded"])
    run.reach(FIRST_KILL)
    run.kill_supervisor()
    run.release()
    ended = run.wait()
    assert ended.status == -signal.SIGKILL, ended.text
    said = "the supervisor of machine 0 was killed; its workers continue. "
    assert ended.text.count(f"{said}End the run with `paceline stop runs/r`.") == 1
    assert ended.text.count("the supervisor of ") == 1
    assert "Finished after " in ended.text
    assert all_end(run.workers())
    undisturbed.requires_trained(run, "sharded", [0, 1, 2])


def test_stop_ends_workers_without_their_supervisor(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = FaultRun(tmp_path, *SYNCS["replicated"], epochs=100_000)
    run.reach(FIRST_KILL)
    run.kill_supervisor()
    run.release()
    capfd.readouterr()
    assert main(["stop", str(run.run_folder)]) == 0
    ended = r"run r is stopped: [34] processes on this machine ended\."  # the supervisor may count
    assert re.search(ended, capfd.readouterr().out)
    assert all_end(run.workers())
    assert proof_of(run.run_folder).exact
    assert "is saved in runs/r" in run.wait().text
