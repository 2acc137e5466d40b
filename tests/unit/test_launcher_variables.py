"""What launchers say by variables, read from sets as the real ones give them."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from collections.abc import Mapping

import pytest

from paceline.cluster.environment import note_for_supervisor, read_environment
from paceline.cluster.launchers.launched_process import LaunchedProcess
from paceline.cluster.launchers.launchers import command_of
from paceline.cluster.launchers.slurm import expand_counts, expand_nodes, port_of
from paceline.errors import ConfigError

TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "41315",
    "OMP_NUM_THREADS": "1",
    "RANK": "3",
    "ROLE_NAME": "default",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_ERROR_FILE": "/tmp/error.json",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_RUN_ID": "213aa719",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "4",
}
MPICH = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "node1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
}
SRUN = {
    "SLURM_JOB_ID": "901593",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "node[01-04]",
    "SLURM_LAUNCH_NODE_IPADDR": "130.239.244.116",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "3",
    "SLURM_NODELIST": "node[01-04]",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "node[01-04]",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
}
SHELL_IN_SALLOC = {
    "SLURM_JOB_ID": "33522533",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "nid[001-002]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_PTY_PORT": "44263",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}


def launched(variables: Mapping[str, str]) -> LaunchedProcess:
    process = read_environment(variables).launched
    assert process is not None
    return process


def test_torchruns_variables_are_read() -> None:
    assert launched(TORCHRUN) == LaunchedProcess(
        launcher="torchrun",
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node=1,
        launch_id="torchrun-213aa719.1",
        master="node0:41315",
        launcher_serves_store=True,
    )


def test_without_torchruns_store_rank_0_serves() -> None:
    assert not launched(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).launcher_serves_store
    by_hand = {k: v for k, v in TORCHRUN.items() if not k.startswith("TORCHELASTIC_")}
    assert not launched(by_hand).launcher_serves_store
    assert launched(by_hand).rank == 3


def test_a_restart_has_another_name() -> None:
    again = launched(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert again.launch_id != launched(TORCHRUN).launch_id


def test_mpichs_variables_are_read() -> None:
    assert launched(MPICH) == LaunchedProcess(
        launcher="mpirun", rank=3, world_size=4, local_rank=1, local_world_size=2
    )


def test_open_mpis_variables_are_read() -> None:
    assert launched(OPEN_MPI) == LaunchedProcess(
        launcher="mpirun", rank=1, world_size=2, local_rank=0, local_world_size=1
    )


def test_sruns_variables_are_read() -> None:
    process = launched(SRUN)
    assert process == LaunchedProcess(
        launcher="slurm",
        rank=6,
        world_size=7,
        local_rank=0,
        local_world_size=1,
        node=3,
        launch_id="slurm-901593.2.0",
        master=f"node01:{port_of('901593', '2')}",
    )
    assert command_of(process.launcher) == "srun"


def test_a_task_of_the_first_node_knows_its_nodes_count() -> None:
    first = launched(SRUN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"})
    assert (first.local_rank, first.local_world_size) == (1, 2)


def test_a_node_alone_has_its_rendezvous_on_the_loopback() -> None:
    alone = {"SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0", "SLURM_LOCALID": "6"}
    assert launched(SRUN | alone).master.startswith("127.0.0.1:")


def test_master_variables_overrule_sruns_nodes() -> None:
    given = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
    assert launched(SRUN | given).master == "10.0.0.7:29500"


def test_a_requeued_job_is_another_start() -> None:
    assert launched(SRUN | {"SLURM_RESTART_COUNT": "1"}).launch_id == "slurm-901593.2.1"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"PATH": "/bin"},
        SHELL_IN_SALLOC,
        SHELL_IN_SALLOC | {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # LaunchParameters=use_interactive…
        SHELL_IN_SALLOC | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},  # Slurm's, for a program that it starts
    ],
)
def test_a_process_alone_is_nobodys(variables: dict[str, str]) -> None:
    environment = read_environment(variables)
    assert (environment.launched, environment.worker) == (None, None)


SHELL_OF_SRUN = SRUN | {
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_PTY_PORT": "40001",
}


@pytest.mark.parametrize("more", [{}, {"SLURM_TASK_PID": ""}, {"PMI_RANK": "0", "PMI_SIZE": "7"}])
def test_the_shell_of_srun_is_alone_with_a_note(more: dict[str, str]) -> None:
    environment = read_environment(SHELL_OF_SRUN | more)
    assert environment.launched is None
    assert "SLURM_PTY_PORT is set and SLURM_STEP_NUM_TASKS is 7" in environment.note
    assert "`srun -n 7`" in environment.note
    assert "`paceline launch -n 7 --`" in environment.note


def test_another_task_of_that_srun_is_one_of_several() -> None:
    assert launched(SRUN | {"SLURM_PTY_PORT": "40001"}).rank == 6


def test_a_task_that_inherits_the_shells_variables_is_one_of_several() -> None:
    own = SHELL_OF_SRUN | {"SLURM_TASK_PID": str(os.getpid())}
    assert launched(own).world_size == 7
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as batch:  # without a terminal
        assert launched(SHELL_OF_SRUN | {"SLURM_TASK_PID": str(batch.pid)}).world_size == 7
        batch.kill()


def test_a_shell_with_a_terminal_is_no_task_of_several() -> None:
    shell, terminal = pty.fork()
    if not shell:
        os.execlp("sh", "sh", "-c", "echo; sleep 100")
    try:
        os.read(terminal, 1)  # it has the terminal now
        environment = read_environment(SHELL_OF_SRUN | {"SLURM_TASK_PID": str(shell)})
        assert environment.launched is None
    finally:
        os.kill(shell, signal.SIGKILL)
        os.waitpid(shell, 0)
        os.close(terminal)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (SHELL_IN_SALLOC, "SLURM_NTASKS is 8, but srun didn't start this process"),
        (
            SHELL_IN_SALLOC | {"SLURM_STEP_ID": str(0xFFFFFFFA)},
            "SLURM_NTASKS is 8, but srun didn't start this process",
        ),
        ({"SLURM_JOB_ID": "1", "SLURM_NNODES": "2"}, "put `srun -n 2` before the command"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}, ""),
        (SHELL_IN_SALLOC | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ""),
        ({}, ""),
    ],
)
def test_a_process_alone_in_a_larger_allocation_has_a_note(
    variables: dict[str, str], told: str
) -> None:
    note = read_environment(variables).note
    assert told in note if told else not note


ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ALONE_BY_TORCHRUN = TORCHRUN | ONE_PROCESS | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}


@pytest.mark.parametrize("outer", [SRUN, OPEN_MPI, MPICH])
def test_agents_of_torchrun_that_know_only_of_themselves_have_a_note(outer: dict[str, str]) -> None:
    count = launched(outer).world_size
    note = read_environment(outer | ALONE_BY_TORCHRUN).note
    assert f"started torchrun {count} times, and this world has 1 of them" in note
    assert f"--nnodes {count}" in note
    together = outer | TORCHRUN | {"GROUP_WORLD_SIZE": str(count)}
    assert not read_environment(together).note
    assert not read_environment(ALONE_BY_TORCHRUN).note


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, "horovodrun started this process as one of 2"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "`paceline launch -n 2 -- COMMAND`"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "unset PMI_RANK and PMI_SIZE."),
        ({"PMIX_RANK": "3"}, "PMIX_RANK 3: a launcher with PMIx started this process as one of se"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE 2: mpirun"),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, "one of 2"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "8"}, "flux run"),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "6"}, "jsrun"),
        ({"DMLC_WORKER_ID": "0", "DMLC_NUM_WORKER": "2"}, "bpslaunch"),
        ({"ALPS_APP_PE": "1"}, "aprun"),
        ({"PALS_RANKID": "1"}, "PALS's mpiexec"),
        ({"PBS_VNODENUM": "1"}, "pbsdsh"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "a launcher started this process"),
        (SHELL_OF_SRUN | {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "horovodrun"),
        # DeepSpeed's, and those of Lightning's own launcher
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"},
            "LOCAL_WORLD_SIZE isn't: start all processes with torchrun",
        ),
        ({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE aren't"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "start all processes with srun"),
        (
            {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1"},
            "SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID",
        ),
    ],
)
def test_one_of_several_processes_that_cant_find_each_other_is_refused(
    variables: dict[str, str], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment(variables)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "variables",
    [
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"},
        {"PMIX_RANK": "0"},
        {"PMI_SIZE": "many"},
        {"LOCAL_RANK": "0"},
    ],
)
def test_one_process_of_such_a_launcher_is_alone(variables: dict[str, str]) -> None:
    environment = read_environment(variables)
    assert (environment.launched, environment.note, environment.refusal) == (None, "", "")


def test_supervisors_that_start_a_run_each_have_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *MPICH, *OPEN_MPI, *SHELL_OF_SRUN):
        monkeypatch.delenv(name, raising=False)
    assert not note_for_supervisor(1, 1)
    with monkeypatch.context() as patch:
        for name, value in SRUN.items():
            patch.setenv(name, value)
        note = note_for_supervisor(1, 2)
        assert "srun started this command 7 times, and each starts a run of its own" in note
        assert "--num_shards 7" in note
        assert not note_for_supervisor(7, 2)
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    assert "horovodrun" in note_for_supervisor(1, 2)
    assert not note_for_supervisor(2, 2)
    monkeypatch.setenv("HOROVOD_SIZE", "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert "srun -n 4" in note_for_supervisor(1, 1)
    assert not note_for_supervisor(1, 4)


def test_the_innermost_launcher_counts() -> None:
    assert launched(SRUN | MPICH).launcher == "mpirun"
    assert launched(SRUN | MPICH | TORCHRUN).launcher == "torchrun"
    assert launched(SRUN | {"RANK": "0", "WORLD_SIZE": "2"}).launcher == "slurm"


def without(variables: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in variables.items() if key != name}


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE aren't"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK, LOCAL_RANK, LOCAL_WORLD_SIZE aren't"),
        (TORCHRUN | {"RANK": "4"}, "RANK 4 and WORLD_SIZE 4: RANK must be less than WORLD_SIZE"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK 2 and LOCAL_WORLD_SIZE 2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE 5: a machine can't have more"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1' in the environment: it must be a whole number"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR isn't: start all processes with torchrun"),
        (without(MPICH, "PMI_SIZE"), "PMI_SIZE isn't: start all processes with mpirun"),
        (MPICH | {"PMI_RANK": "9"}, "PMI_RANK 9 and PMI_SIZE 4"),
        (without(SRUN, "SLURM_NODEID"), "SLURM_NODEID isn't: start all processes with srun"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "8"}, "contradict each other"),
        (SRUN | {"SLURM_NODEID": "4"}, "SLURM_NODEID 4 contradict each other"),
        (SRUN | {"SLURM_PROCID": "7"}, "SLURM_PROCID 7 and SLURM_STEP_NUM_TASKS 7"),
        (
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2x3"},
            "SLURM_STEP_TASKS_PER_NODE '2x3': it must have a form such as 2(x3),1",
        ),
        (
            without(SRUN, "SLURM_STEP_TASKS_PER_NODE") | {"SLURM_TASKS_PER_NODE": "2x3"},
            "SLURM_TASKS_PER_NODE '2x3': it must have a form such as 2(x3),1",
        ),
        (
            SRUN | {"SLURM_STEP_NODELIST": "a[1"},
            "SLURM_STEP_NODELIST 'a[1': it must have a form such as",
        ),
        (
            without(SRUN, "SLURM_STEP_NODELIST") | {"SLURM_NODELIST": "a[1-]"},
            "SLURM_NODELIST 'a[1-]': it must have a form such as",
        ),
    ],
)
def test_variables_that_cant_be_are_named(variables: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment(variables)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node1", ["node1"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("a[9-11],b", ["a9", "a10", "a11", "b"]),
        ("r[1-2]n[3,5]-ib,login.lab", ["r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib", "login.lab"]),
    ],
)
def test_node_lists_are_written_out(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text, "SLURM_NODELIST") == nodes


@pytest.mark.parametrize("text", ["", "a,,b", "a[", "a]", "a[1-]", "a[]", "a[x-y]", "a b"])
def test_what_is_no_node_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^SLURM_NODELIST "):
        expand_nodes(text, "SLURM_NODELIST")


def test_counts_are_written_out() -> None:
    assert expand_counts("2(x3),1", "SLURM_TASKS_PER_NODE") == (2, 2, 2, 1)
    assert expand_counts("16", "SLURM_TASKS_PER_NODE") == (16,)


def test_ports_are_free_for_servers_and_spread() -> None:
    ports = {port_of(str(job), "0") for job in range(1000)}
    assert ports <= set(range(16384, 32768))
    assert len(ports) > 900
    assert port_of("12", "3") != port_of("123", "")
