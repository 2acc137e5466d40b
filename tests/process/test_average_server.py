"""Averaging through a server, a process of its own: the same bits, and what its loss leaves."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from paceline.cluster.environment import WORKER_VARIABLE
from paceline.state.checkpoint_files import read_checkpoint
from tests.harness.processes.bad_inputs import no_process_left
from tests.harness.processes.command import Command, all_end, run
from tests.harness.processes.fork_server import environment_of
from tests.harness.processes.run_folders import (
    hold,
    losses,
    release,
    wait_until,
    wait_until_step,
    write_net,
)

STEPS = 24  # of two epochs; the last batch of each is short
TRAIN = (
    *("train", "--train_data", "null", "--epoch_size", "70", "--image_size", "32"),
    *("--augment", "none", "--num_labels", "3", "--batch_size", "6", "--num_epochs", "2"),
    *("--model", "net:plain", "--num_workers", "2", "--checkpoint_steps", "2"),
    *("--sync", "average", "--average_every", "5", "--fragments", "2", "--outer", "diloco"),
)
SERVED = ("--average_through", "server")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_net(tmp_path)
    return tmp_path


def weights(folder: Path) -> Mapping[str, Tensor]:
    """Read the weights of a finished run."""
    state = read_checkpoint(folder / "checkpoints" / f"step-{STEPS:08}.pt")["model"]
    assert isinstance(state, dict)
    return state


def server_of(command: Command) -> list[psutil.Process]:
    """Find the server among the processes of a run: its local rank follows the workers'."""
    found = []
    for process in command.family():
        text = environment_of(process).get(WORKER_VARIABLE)
        if text is not None and json.loads(text)["local_rank"] == 2:
            found.append(process)
    return found


@pytest.mark.timeout(300)
def test_a_server_that_is_killed_ends_the_run_with_its_name_and_the_run_resumes(
    here: Path,
) -> None:
    plain = run(*TRAIN, "--run_id", "plain", folder=here)
    assert plain.status == 0, plain.text
    hold(here, 14, 0.5)
    command = Command(*TRAIN, *SERVED, "--run_id", "served", folder=here)
    wait_until_step(here / "runs" / "served", 12, generation=0)
    family, (server,) = command.family(), server_of(command)
    server.kill()
    ended = command.wait()
    assert ended.status == 1, ended.text
    assert "the averaging server on machine 0 (" in ended.text
    assert "was killed by SIGKILL" in ended.text
    assert "the run has lost the averaging server on " in ended.text
    assert all_end(family)
    release(here)
    for through in (SERVED, ()):  # the second finds the run finished
        again = run(*TRAIN, *through, "--run_id", "served", folder=here)
        assert again.status == 0, again.text
    told = losses(here / "runs" / "served")
    expected = losses(here / "runs" / "plain")
    assert {step: set(values) for step, values in told.items()} == {
        step: set(values) for step, values in expected.items()
    }
    found = weights(here / "runs" / "served")
    for name, value in weights(here / "runs" / "plain").items():
        assert torch.equal(found[name], value), name


@pytest.mark.timeout(300)
def test_a_server_apart_is_the_runs_only_one_and_its_end_ends_the_run(here: Path) -> None:
    (here / "meet").mkdir()
    meet = ("--run_id", "apart", "--file_store_path", "meet")
    hold(here, 10, 0.5)
    with no_process_left() as environment:
        start = partial(Command, folder=here, environment=environment)
        server = start("serve", *meet)
        server.line_with("waiting for run 'apart'")
        training = start(*TRAIN, *SERVED, "--average_server", "apart", *meet)
        server.line_with("joined run 'apart'")
        second = start("serve", *meet).wait()
        assert second.status == 2, second.text
        assert "Run 'apart' has a server already, the averaging server on " in second.text
        wait_until_step(here / "runs" / "apart", 8, generation=0)
        server.send(signal.SIGTERM)
        stopped, ended = server.wait(), training.wait()
        assert stopped.status == 143, stopped.text
        assert "lost the averaging server on " in ended.text
        assert f"(process {server.pid})" in ended.text
        assert ended.status == 1, ended.text
    wait_until(lambda: not any((here / "meet").iterdir()))
    release(here)
    again = run(*TRAIN, "--run_id", "apart", folder=here)
    assert again.status == 0, again.text
    assert sorted(losses(here / "runs" / "apart")) == list(range(STEPS))
