"""What launchers say by variables, read from sets as the real ones give them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from paceline.cluster.environment import read_environment
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
