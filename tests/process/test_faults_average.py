"""The fault suite of `--sync average`: processes are killed, and a replay trains the same bits.

The replay trains the same cuts in threads of the test, where a member leaves at the step from which
the others continued, and hands its part over to its backup holder. Nothing is lost in it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.harness.processes.command import all_end
from tests.harness.processes.fault_replays import FaultReplays
from tests.harness.processes.fault_runs import (
    FIRST_KILL,
    LAST_KILL,
    Change,
    FaultRun,
    proof_of,
)
from tests.harness.processes.run_folders import events

AVERAGE = ("--sync", "average", "--bucket_mb", "0.002", "--average_every", "4")
FORMS = {
    "plain": AVERAGE,
    "fragments": (*AVERAGE, "--fragments", "2", "--average_delay", "1", "--outer", "diloco"),
    "momenta": (*AVERAGE, "--average_momenta", "average", "--average_delay", "1"),
    "easgd": (*AVERAGE, "--outer", "easgd"),
}
SERVED = ("--average_through", "server")
Replay = Callable[[str, int, int, tuple[int, ...]], Mapping[str, Tensor]]


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    """What trains a form undisturbed, where members leave at a step."""
    replays = FaultReplays(tmp_path_factory)

    def train(form: str, workers: int, start: int, left: tuple[int, ...]) -> Mapping[str, Tensor]:
        return replays.weights(FORMS[form], (workers,), [Change(start, left)] if left else [])

    return train


def requires_exact(run: FaultRun) -> None:
    """Require that the run's files prove that each sample was trained once, in all epochs."""
    proof = proof_of(run.run_folder)
    assert proof.exact, proof.faults
    assert proof.done == proof.extent.steps * proof.extent.epochs


def requires_equal(run: FaultRun, continued: list[int], expected: Mapping[str, Tensor]) -> None:
    """Require that these workers' processes, and no new ones, trained to the same bits."""
    requires_exact(run)
    assert run.evaluated() <= set(run.pids.values())
    assert run.completed() == continued
    for weights in (run.weights(), *map(run.weights_of, continued)):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def start_of(run: FaultRun) -> int:
    """Return the step from which the last generation continued."""
    starts: dict[int, int] = {
        event["generation"]: event["start"]
        for rank in range(run.count)
        for event in events(run.run_folder, rank)
        if event["event"] == "run"
    }
    return starts[max(starts)]


@pytest.mark.parametrize(
    ("form", "served", "workers", "lost"),
    [
        ("fragments", (), 3, (2,)),
        ("momenta", (), 3, (0,)),
        ("plain", SERVED, 3, (1,)),
        ("easgd", (), 4, (0, 2)),
    ],
    ids=str,
)
def test_the_others_continue_in_their_processes_where_workers_are_killed(
    tmp_path: Path,
    replay: Replay,
    form: str,
    served: tuple[str, ...],
    workers: int,
    lost: tuple[int, ...],
) -> None:
    run = FaultRun(tmp_path, *FORMS[form], *served, machines=(workers,))
    # Two losses may be noticed one after the other: the start is an epoch's end, of which all
    # parts have a copy.
    run.reach(FIRST_KILL if len(lost) == 1 else LAST_KILL - 1)
    run.kill(*lost)
    run.release()
    ended = run.wait()
    assert ended.status == 0, ended.text
    assert "Traceback" not in ended.text
    start = start_of(run)
    assert ended.text.count(" was killed by SIGKILL.") >= len(lost), ended.text
    assert f". 2 processes continue from step {start} as" in ended.text, ended.text
    continued = [rank for rank in range(workers) if rank not in lost]
    requires_equal(run, continued, replay(form, workers, start, lost))


def test_workers_and_server_of_merges_train_to_the_end_without_their_supervisor(
    tmp_path: Path, replay: Replay
) -> None:
    run = FaultRun(tmp_path, *FORMS["plain"], *SERVED)
    run.reach(FIRST_KILL)
    run.kill_supervisor()
    run.release()
    ended = run.wait()
    assert ended.status == -signal.SIGKILL, ended.text
    said = "the supervisor of machine 0 was killed; its workers continue. "
    assert ended.text.count(f"{said}End the run with `paceline stop runs/r`.") == 1
    assert ended.text.count("the supervisor of ") == 1
    assert "Finished after " in ended.text
    assert "Traceback" not in ended.text
    assert all_end([*run.workers(), *run.servers()])
    requires_equal(run, [0, 1, 2], replay("plain", 3, 0, ()))


def test_a_run_whose_server_of_merges_is_killed_ends_with_its_last_merge_on_the_disk(
    tmp_path: Path, replay: Replay
) -> None:
    run = FaultRun(tmp_path, *FORMS["plain"], *SERVED)
    run.reach(FIRST_KILL)
    (server,) = run.servers()
    server.kill()
    run.release()
    ended = run.wait()
    assert ended.status == 1, ended.text
    assert "the averaging server on machine 0 (" in ended.text
    assert "was killed by SIGKILL" in ended.text
    assert "the run has lost the averaging server on " in ended.text
    assert "Traceback" not in ended.text
    start = start_of(run)
    assert f"the state after {start} steps is saved in runs/r" in ended.text
    proof = proof_of(run.run_folder)
    assert (proof.exact, proof.done) == (True, start), proof.faults
    again = run.again()
    assert again.status == 0, again.text
    requires_exact(run)
    expected = replay("plain", 3, 0, ())
    assert all(torch.equal(run.weights()[name], value) for name, value in expected.items())
