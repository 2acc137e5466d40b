"""`paceline stop RUN`: ends a run as Ctrl-C in its terminal does, from another terminal.

The status is 0 if no process of the run is left on this machine, 1 if one is left or none is known
here, 2 if there is no such run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.cli.active_run.find_run import find_run
from paceline.cli.flags import parse
from paceline.cluster.supervision.requests.member_record import MemberRecord
from paceline.cluster.supervision.requests.run_requests import StopResult, stop_run
from paceline.config.active_run import StopConfig
from paceline.errors import many

_DESCRIPTION = """\
End a run on all its machines, and save its state, as Ctrl-C does.

The command asks the run's processes on this machine.

Those on other machines end with them.

Exit status: 0, no process of the run is left here; 1, one is; 2, no such run.

It is 1, too, where the run may be active on other machines only.

Examples:
  paceline stop first
  paceline stop runs/first --timeout 60"""


def main(argv: Sequence[str]) -> int:
    """Run the command after `paceline stop`; return its exit status.

    Raises:
        ConfigError: there is no such run.
        SystemExit: help was requested (0), or the arguments are wrong (2).
    """
    config = parse(StopConfig, argv, prog="paceline stop", description=_DESCRIPTION)
    run = find_run(config.run, Path(config.output_dir))
    result = stop_run(run, config.timeout)
    for line in describe(run, result, config.timeout):
        print(line)
    return 1 if result.running or (result.elsewhere and not result.ended) else 0


def describe(run: Path, result: StopResult, timeout: float) -> list[str]:
    """Return the result as lines.

    Args:
        run: the run's folder.
        timeout: seconds that were waited for the end of the processes.
    """
    lines = [f"{line}" for line in result.refused]
    if result.running:
        pids = " ".join(str(record.process.pid) for record in result.running)
        waited = "" if result.refused else f" after {timeout:g} s"
        lines.append(
            f"run {run.name} isn't stopped: {many(len(result.running), 'process')} "
            f"on this machine still running{waited}; repeat the command, or end "
            f"{'it' if len(result.running) == 1 else 'them'} with kill -9 {pids}."
        )
    elif result.ended:
        ended = many(len(result.ended), "process")
        lines.append(f"run {run.name} is stopped: {ended} on this machine ended.")
    elif result.elsewhere:
        lines.append(
            f"run {run.name} has no process on this machine; the last known ones are on "
            f"{_hosts(result.elsewhere)}: repeat the command there."
        )
    else:
        lines.append(f"run {run.name} isn't active on this machine.")
    if result.elsewhere and result.ended and not result.running:
        lines.append(f"Its processes on {_hosts(result.elsewhere)} end with them.")
    return lines


def _hosts(records: Iterable[MemberRecord]) -> str:
    return ", ".join(sorted({record.process.host for record in records}))
