"""Parameter servers as processes of their own: for the command and for scripts, with faults."""

from __future__ import annotations

import re
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.harness.processes.bad_inputs import no_process_left
from tests.harness.processes.command import Command, Result, all_end, run
from tests.harness.processes.fault_runs import (
    EXACT,
    FIRST_KILL,
    FaultRun,
    distance,
    load,
    proof_of,
    requires_exact,
)
from tests.harness.processes.run_folders import (
    hold,
    losses,
    release,
    wait_until,
    wait_until_step,
    write_net,
)

SERVED = ("--sync", "server", "--num_servers", "2", "--bucket_mb", "0.01")
TRAIN = (
    *("train", "--train_data", "null", "--epoch_size", "70", "--image_size", "32"),
    *("--augment", "none", "--num_labels", "3", "--batch_size", "6", "--num_epochs", "2"),
    *("--model", "net:plain", "--num_workers", "2", "--checkpoint_steps", "2"),
)
STEPS = 24  # of two epochs; the last batch of each is short
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of one process, in float64."""
    undisturbed = FaultRun(tmp_path_factory.mktemp("alone"), "--sync", "allreduce", machines=(1,))
    undisturbed.release()
    ended = undisturbed.wait()
    assert ended.status == 0, ended.text
    return dict(undisturbed.weights())


def requires_trained(faulty: FaultRun, ended: Result, alone: dict[str, torch.Tensor]) -> None:
    """Require an exact ledger, the weights of one process, and that no process is left."""
    assert ended.status == 0, ended.text
    assert "Traceback" not in ended.text
    requires_exact(faulty)
    assert distance(faulty.weights(), alone) < EXACT
    assert all_end(faulty.servers())


@pytest.mark.timeout(300)
def test_two_workers_and_two_servers_train_as_one_process_does(
    tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    served = FaultRun(tmp_path, *SERVED, machines=(2,))
    served.reach(FIRST_KILL)
    assert len(served.servers()) == 2
    served.release()
    ended = served.wait()
    assert "values of 2 workers, updated by SGD on " in ended.text
    requires_trained(served, ended, alone)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workers", "lost"), [(3, (0,)), (2, (1,))])
def test_the_servers_serve_the_workers_that_are_left(
    tmp_path: Path, alone: dict[str, torch.Tensor], workers: int, lost: tuple[int, ...]
) -> None:
    served = FaultRun(tmp_path, *SERVED, machines=(workers,))
    served.reach(FIRST_KILL)
    served.kill(*lost)
    served.release()
    ended = served.wait()
    assert " was killed by SIGKILL. " in ended.text
    assert "are owned by" not in ended.text
    requires_trained(served, ended, alone)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("lost", "owners"), [((0,), "1 server"), ((0, 1), "the workers")], ids=["one", "all"]
)
def test_the_workers_continue_without_servers_that_are_killed(
    tmp_path: Path, alone: dict[str, torch.Tensor], lost: tuple[int, ...], owners: str
) -> None:
    served = FaultRun(tmp_path, *SERVED, machines=(2,))
    served.reach(FIRST_KILL)
    for number in lost:
        served.servers()[number].kill()
    served.release()
    ended = served.wait()
    named = r"parameter server \d on machine 0 \(\S+\) was killed by SIGKILL"
    assert len(set(re.findall(named, ended.text))) == len(lost), ended.text
    assert ended.text.count("The workers continue without it.") == len(lost), ended.text
    assert f": all parameters are owned by {owners} from now on." in ended.text
    assert served.completed() == [0, 1]
    requires_trained(served, ended, alone)


@pytest.mark.timeout(300)
def test_the_others_continue_where_a_worker_and_a_server_are_killed_at_once(
    tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    served = FaultRun(tmp_path, *SERVED, machines=(3,))
    served.reach(FIRST_KILL)
    served.servers()[1].kill()
    served.kill(0)
    served.release()
    ended = served.wait()
    assert ": all parameters are owned by 1 server from now on." in ended.text
    assert served.completed() == [1, 2]
    requires_trained(served, ended, alone)


@pytest.mark.timeout(300)
def test_one_worker_saves_its_state_without_its_server_and_the_run_resumes(
    tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    served = FaultRun(tmp_path, "--sync", "server", "--bucket_mb", "0.01", machines=(1,))
    served.reach(FIRST_KILL)
    (server,) = served.servers()
    server.kill()
    served.release()
    ended = served.wait()
    assert ended.status == 1, ended.text
    assert "waiting for the parameter server" not in ended.text
    assert "the parameter server on machine 0 (" in ended.text
    assert "was killed by SIGKILL" in ended.text
    assert "Traceback" not in ended.text
    assert " is saved in runs/r, and the same command resumes it." in ended.text
    requires_trained(served, served.again(), alone)


@pytest.mark.timeout(300)
def test_a_run_of_which_all_processes_are_killed_resumes(
    tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    served = FaultRun(tmp_path, *SERVED, machines=(2,))
    served.reach(FIRST_KILL)
    served.reach_checkpoint()
    served.kill(0, 1)
    assert served.wait().status == 1
    assert all_end(served.servers())
    served.release()
    requires_trained(served, served.again(), alone)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_net(tmp_path)
    return tmp_path


@pytest.mark.timeout(300)
def test_ctrl_c_saves_the_state_and_no_process_is_left(here: Path) -> None:
    hold(here, 8, 0.5)
    command = Command(*TRAIN, *SERVED, "--run_id", "r", folder=here)
    wait_until_step(here / "runs" / "r", 6, generation=0)
    family = command.family()
    command.send(signal.SIGINT)
    ended = command.wait()
    assert ended.status == 130, ended.text
    assert " is saved in runs/r, and the same command resumes it." in ended.text
    assert all_end(family)
    release(here)
    again = run(*TRAIN, *SERVED, "--run_id", "r", folder=here)
    assert again.status == 0, again.text
    assert sorted(losses(here / "runs" / "r")) == list(range(STEPS))
    assert proof_of(here / "runs" / "r").exact


@pytest.mark.timeout(300)
def test_servers_that_a_user_starts_end_with_the_run(here: Path) -> None:
    hold(here, 2)
    (here / "meet").mkdir()
    meet = ("--run_id", "apart", "--file_store_path", "meet")
    with no_process_left() as environment:
        start = partial(Command, folder=here, environment=environment)
        servers = [start("serve", *meet) for _ in range(2)]
        training = start(*TRAIN, *SERVED, "--parameter_servers", "apart", *meet)
        for server in servers:
            line = server.line_with("serving 2 workers: ")
            assert "SGD, as server " in line
        third = start("serve", *meet).wait()
        assert third.status == 2, third.text
        assert "Run 'apart' has 2 servers already, the parameter server on " in third.text
        release(here)
        ended = training.wait()
        assert ended.status == 0, ended.text
        for server in servers:
            stopped = server.wait()
            assert stopped.status == 0, stopped.text
            assert "the run's workers have ended." in stopped.text
    wait_until(lambda: not any((here / "meet").iterdir()))


SCRIPT = """
import sys
import torch
from torch import nn
import paceline

torch.manual_seed(0)
samples = torch.randn(48, 6, dtype=torch.float64)
labels = torch.randint(3, (48,))
world = paceline.join(run=None)
model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model[0].bias.requires_grad_(False)
paceline.parallelize(model, optimizer, world, sync=sys.argv[1])
data = torch.utils.data.TensorDataset(samples, labels)
loader = paceline.loader(data, batch_size=10, world=world, seed=1)
for epoch in range(3):
    model[0].bias.requires_grad_(epoch > 0)
    for x, y in loader:
        with world.step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
if world.rank == 0:
    world.settle()
    torch.save(model.state_dict(), sys.argv[2])
world.close()
"""


@pytest.mark.timeout(300)
def test_a_script_on_servers_that_launch_starts_equals_one_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ("--", sys.executable, "script.py")
    environment = {"PYTHONPATH": str(ROOT)}

    def launch(*words: str) -> Result:
        return Command("launch", *words, folder=tmp_path, environment=environment).wait()

    plain = launch("-n", "1", *command, "allreduce", "plain.pt")
    assert plain.status == 0, plain.text
    served = launch("-n", "2", "--num_servers", "2", *command, "server", "served.pt")
    assert served.status == 0, served.text
    assert "values of 2 workers, updated by AdamW on " in served.text
    assert distance(load(tmp_path / "served.pt"), load(tmp_path / "plain.pt")) < EXACT


UNSERVED = """
import paceline
import torch

world = paceline.join()
model = torch.nn.Linear(1, 1)
paceline.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
world.close()
"""


@pytest.mark.timeout(300)
def test_a_script_without_use_for_the_servers_says_so_and_ends_them(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNSERVED)
    command = ("launch", "-n", "2", "--num_servers", "1", "--", sys.executable, "script.py")
    with no_process_left() as environment:
        ended = Command(*command, folder=tmp_path, environment=environment).wait()
        assert ended.status == 0, ended.text
    said = "launch started 1 server with --num_servers 1, which this model doesn't use: pass sync="
    assert ended.text.count(said) == 1


def test_launch_without_servers_names_its_option_where_the_script_needs_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ("--", sys.executable, "script.py", "server", "served.pt")
    limit = ("--first_iter_timeout", "1")
    environment = {"PYTHONPATH": str(ROOT)}
    words = ("launch", "-n", "1", *limit, *command)
    ended = Command(*words, folder=tmp_path, environment=environment).wait()
    assert ended.status == 1
    assert ", or let paceline launch start it by --num_servers 1." in ended.text
