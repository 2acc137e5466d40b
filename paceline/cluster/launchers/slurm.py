"""Reader of the variables that Slurm's srun sets.

A shell inside an allocation (`salloc`, a batch script, `srun --pty bash`) has most of the same
variables and is no task of several: what counts is a step of one's own with more than one task. A
process in such a shell is a world of one, with a note if Slurm allocated several tasks.

Slurm names no rendezvous. The tasks derive it, all the same one: the first node of the step,
where rank 0 runs, and a port that follows from the job's and the step's numbers. `MASTER_ADDR` and
`MASTER_PORT` overrule either. See the section "OUTPUT ENVIRONMENT VARIABLES" of srun(1).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

from paceline.cluster.launchers.launched_process import (
    LaunchedProcess,
    read_integer,
    read_numbers,
    read_port,
    require,
)
from paceline.errors import ConfigError

_OWN_STEPS = 0xFFFFFFF0  # from here on, Slurm numbers steps of its own: batch script, shell …
_PORTS = range(16384, 32768)  # below those that Linux hands out to clients
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_COMMA = re.compile(r",(?![^\[]*\])")  # outside of brackets
_NODE = re.compile(r"(?=.)[^\[\]\s]*(?:\[\d[\d,-]*\][^\[\]\s]*)*")
_BRACKET = re.compile(r"\[([\d,-]*)\]")


def read_srun(variables: Mapping[str, str]) -> LaunchedProcess | None:
    """Read rank, world size and local rank; None if srun didn't start it as one of several.

    Raises:
        ConfigError: the variables contradict each other, or some are missing; names them.
    """
    size = _name(variables, "STEP_NUM_TASKS", "NTASKS")
    counts_name = _name(variables, "STEP_TASKS_PER_NODE", "TASKS_PER_NODE")
    nodes_name = _name(variables, "STEP_NODELIST", "NODELIST")
    task = variables.get("SLURM_PROCID")
    if variables.get(size) == "1" or in_srun_shell(variables):
        return None
    # A batch script runs in a step of Slurm's own, as
    # task 0, and has the variables of the whole job.
    if task in (None, "0") and not _of_own_step(variables):
        return None
    if task is None and size not in variables:
        return None
    needed = (
        *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
        *(size, "SLURM_LOCALID", "SLURM_NODEID"),
    )
    require(variables, (*needed, counts_name, nodes_name), "srun")
    counts = expand_counts(variables[counts_name], counts_name)
    node = read_integer(variables, "SLURM_NODEID")
    if sum(counts) != read_integer(variables, size) or node >= len(counts):
        raise ConfigError(
            f"{counts_name} {variables[counts_name]}, {size} {variables[size]} and SLURM_NODEID "
            f"{node} contradict each other: check where these variables are set."
        )
    names = ("SLURM_PROCID", size, "SLURM_LOCALID", "tasks of this node")
    process = read_numbers({**variables, names[3]: str(counts[node])}, "slurm", "srun", names)
    job = variables["SLURM_JOB_ID"]
    step = variables["SLURM_STEP_ID"]
    first = "127.0.0.1" if len(counts) == 1 else expand_nodes(variables[nodes_name], nodes_name)[0]
    port = variables.get("MASTER_PORT") and read_port(variables, "MASTER_PORT")
    return replace(
        process,
        node=node,
        launch_id=f"slurm-{job}.{step}.{variables.get('SLURM_RESTART_COUNT', '0')}",
        master=f"{variables.get('MASTER_ADDR', first)}:{port or port_of(job, step)}",
    )


def in_srun_shell(variables: Mapping[str, str]) -> bool:
    """Return whether this process is in the shell of `srun --pty`, which the first task alone has.

    What is started from that shell inherits its variables, another srun's tasks included. Slurm
    says which process is the task: it has no terminal there, or is this process itself.
    """
    if "SLURM_PTY_PORT" not in variables or variables.get("SLURM_PROCID") != "0":
        return False
    task = variables.get("SLURM_TASK_PID", "")
    try:
        stat = Path(f"/proc/{int(task)}/stat").read_text()
    except (OSError, ValueError):  # it isn't given, or is another container's number
        return True
    terminal = stat.rpartition(")")[2].split()[4]
    return int(task) != os.getpid() and terminal != "0"


def note_on_allocation(variables: Mapping[str, str]) -> str:
    """Return a note on a process that `read_srun` finds to be none of several; "" if that is clear.

    Args:
        variables: the environment.
    """
    names = ["SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES"]
    in_step = _of_own_step(variables)
    if in_step:
        names = [_name(variables, "STEP_NUM_TASKS", "NTASKS")] if in_srun_shell(variables) else []
    given = next((name for name in names if variables.get(name, "1") not in ("0", "1")), "")
    if not given:
        return ""
    tasks = f"{given} is {variables[given]}"
    together = f"put `srun -n {variables[given]}` before the command"
    if in_step:
        return (
            f"SLURM_PTY_PORT is set and {tasks}: this is the shell of `srun --pty`, in which a "
            f"process trains alone. To train with all, {together}, outside of the shell, or "
            f"`paceline launch -n {variables[given]} --` here; if this is a task, unset "
            "SLURM_PTY_PORT."
        )
    return (
        f"{tasks}, but srun didn't start this process: it trains alone. To train with all, "
        f"{together}."
    )


def _of_own_step(variables: Mapping[str, str]) -> bool:
    """Return whether a user's own srun started this process, or the shell that it is in."""
    return "SLURM_STEP_ID" in variables and read_integer(variables, "SLURM_STEP_ID") < _OWN_STEPS


def expand_nodes(text: str, variable: str) -> list[str]:
    """Return the names in a node list: "a[01-02,7],b" is a01, a02, a7, b.

    Args:
        text: the list.
        variable: the name of its variable.

    Raises:
        ConfigError: it isn't such a list; names the variable.
    """
    nodes = _COMMA.split(text)
    if not all(_NODE.fullmatch(node) for node in nodes):
        raise _not_nodes(text, variable)
    return [name for node in nodes for name in _names(node, text, variable)]


def expand_counts(text: str, variable: str) -> tuple[int, ...]:
    """Return the tasks of each node: "2(x3),1" is 2, 2, 2, 1; as `expand_nodes`."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ConfigError(f"{variable} {text!r}: it must have a form such as 2(x3),1.")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def port_of(job: str, step: str) -> int:
    """Return the port of the rendezvous of a step's tasks."""
    digest = hashlib.sha256(f"{job}.{step}".encode()).digest()
    return _PORTS[int.from_bytes(digest[:8], "big") % len(_PORTS)]


def _name(variables: Mapping[str, str], step: str, job: str) -> str:
    """Return the name of the step's variable, or of the job's where the step has none."""
    return f"SLURM_{step if f'SLURM_{step}' in variables else job}"


def _names(node: str, text: str, variable: str) -> Iterator[str]:
    """Write out one entry of a list: each bracket means any of its numbers."""
    parts = _BRACKET.split(node)  # literal, bracket, literal, …
    choices = [
        list(_numbers(part, text, variable)) if i % 2 else [part] for i, part in enumerate(parts)
    ]
    yield from map("".join, product(*choices))


def _numbers(bracket: str, text: str, variable: str) -> Iterator[str]:
    for part in bracket.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()):
            raise _not_nodes(text, variable)
        yield from (f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1))


def _not_nodes(text: str, variable: str) -> ConfigError:
    return ConfigError(f"{variable} {text!r}: it must have a form such as node[01-03,07],login.")
