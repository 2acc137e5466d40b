"""`paceline status RUN`: members, generation, step, speed and losses of a run.

The status is 0 if a process of the run answers or the run is finished, 1 if neither is so, and 2
if there is no such run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.active_run.find_run import find_run
from paceline.cli.flags import parse
from paceline.cluster.supervision.requests.member_record import RunProcesses, read_records
from paceline.cluster.supervision.requests.run_requests import ask_status
from paceline.cluster.supervision.requests.run_status import RunStatus
from paceline.config.active_run import StatusConfig
from paceline.errors import DataError, Message, many
from paceline.observe.last_state import LastState, best_sentence, last_state
from paceline.state.run_folder import is_finished

_DESCRIPTION = """\
Show a run's members, generation, step, speed and lost workers.

A process of the run on this machine is asked.

Where none runs, the last known state is read from the run's folder.

Exit status: 0, a process answers or the run is finished; 1, neither; 2, no run.

Examples:
  paceline status first
  paceline status runs/first --json"""


def main(argv: Sequence[str]) -> int:
    """Run the command after `paceline status`; return its exit status.

    Raises:
        ConfigError: there is no such run.
        DataError: an event file can't be read.
        SystemExit: help was requested (0), or the arguments are wrong (2).
    """
    config = parse(StatusConfig, argv, prog="paceline status", description=_DESCRIPTION)
    run = find_run(config.run, Path(config.output_dir))
    answered = ask_status(run)
    if answered is None:
        return _print_last(run, as_json=config.json)
    status = with_processes(answered[0], run)
    if config.json:
        print(json.dumps({"run": run.name, "active": True, **asdict(status)}))
    else:
        _print_status(run, status, Console())
    return 0


def with_processes(status: RunStatus, run: Path) -> RunStatus:
    """Add to a status the process numbers that the run's records name."""
    pids = {record.id: record.process.pid for record in read_records(run)}
    members = (
        replace(member, pid=pids.get(member.id) if member.pid is None else member.pid)
        for member in status.members
    )
    return replace(status, members=tuple(members))


def describe(run: Path, status: RunStatus) -> Iterator[str]:
    """Yield a status as lines, without the table of its members."""
    speed = status.samples_per_second
    done = [] if status.step is None else [f"{many(status.step, 'step')} completed"]
    if status.step is not None and status.total_steps is not None:
        done = [f"{status.step:,} of {many(status.total_steps, 'step')} completed"]
    yield ", ".join(
        [
            f"Run {run.name} is active: generation {status.generation}",
            *done,
            *([] if speed is None else [f"{speed:,.0f} samples/s"]),
            f"{many(len(status.members), 'member')}.",
        ]
    )
    for loss in status.losses:
        cost = "" if loss.seconds is None else f" (cost {loss.seconds:.1f} s)"
        cause = loss.cause or f"member {loss.member}; only other members know the cause"
        yield f"Lost from generation {loss.generation}{cost}: {cause.rstrip('.')}."


def describe_last(run: Path, state: LastState, *, finished: bool, here: int, hosts: str) -> str:
    """Return the last known state of a run of which no process answers.

    Args:
        run: the run's folder.
        state: what the event files show.
        finished: whether the run is finished.
        here: the number of its processes on this machine, which don't answer.
        hosts: the machines of other processes, whose state isn't known here.
    """
    steps = many(state.steps, "step")
    if finished:
        done = f"Run {run.name} is finished, after {steps} in generation {state.generation or 0}"
        done += f": {state.reason}" if state.reason else ""
        best = best_sentence(state.best, state.best_epoch)
        weights = f"weights: {', '.join(state.weights)}" if state.weights else ""
        return f"{'; '.join(filter(None, (done, best, weights)))}."
    if here:
        processes = many(here, "process")
        first = f"Run {run.name} is active, but its {processes} on this machine didn't answer."
    elif hosts:
        first = (
            f"Run {run.name} has no process on this machine; the last known ones are on {hosts}: "
            "repeat the command there."
        )
    else:
        first = f"Run {run.name} isn't active on this machine."
    if state.generation is None:
        return f"{first} No step of it is recorded."
    saved = state.checkpoint
    kept = "no checkpoint is recorded" if saved is None else f"a checkpoint has {saved:,} of them"
    return f"{first} Last known: generation {state.generation}, {steps}; {kept}."


def _print_last(run: Path, *, as_json: bool) -> int:
    try:
        state = last_state(run)
    except OSError as error:
        raise DataError(
            Message("{} can't be read ({}); run this as the run's user.", run, error.strerror)
        ) from error
    processes = RunProcesses.of(run)
    finished = is_finished(run)
    if as_json:
        known = {"active": bool(processes.here), "finished": finished, **asdict(state)}
        print(json.dumps({"run": run.name, **known}))
        return 0 if finished else 1
    hosts = ", ".join(sorted({record.process.host for record in processes.elsewhere}))
    print(describe_last(run, state, finished=finished, here=len(processes.here), hosts=hosts))
    return 0 if finished else 1


def _print_status(run: Path, status: RunStatus, console: Console) -> None:
    table = Table(pad_edge=False)
    for name in ("rank", "role", "machine", "host", "process"):
        table.add_column(name, justify="left" if name in ("role", "host") else "right")
    for member in status.members:
        pid = "" if member.pid is None else str(member.pid)
        table.add_row(str(member.rank), member.role, str(member.machine), member.host, pid)
    first, *others = describe(run, status)
    console.print(Text(first), soft_wrap=True)
    console.print(table)
    for line in others:
        console.print(Text(line), soft_wrap=True)
