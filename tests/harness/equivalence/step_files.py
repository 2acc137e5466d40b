"""The files of `paceline` that run in a step: `--sync notified --wire int8`, on two machines.

    python -m tests.harness.equivalence.step_files [--against CHECKOUT]

Two processes, two machines by their launcher's variables, train by the public library
(`step_ranks.py`), so that the script fits any checkout. A step is all that happens from one entry
of `world.step()` to the next, in all threads of both ranks: it holds what runs from the
synchronizer's `begin` to its next one. Steps 5 to 8 count, by then all that the first steps learn
is known. Without a run folder, in-memory snapshots and replica checks: these come now and then.

A file counts if a line of it ran, a generated method of its dataclass included. Of functions that
numba has compiled no line is seen: one counts where it is called or still runs, and with it each
compiled function that its code names. `cli`, `config`, `data`, `models` and `observe` don't count;
nor does `cluster/membership`, whose threads run beside the steps at moments of their own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.harness.network.ports import free_port
from tests.harness.processes.launcher_processes import LoggedProcess
from tests.harness.processes.python_program import ROOT

RANKS = Path(__file__).with_name("step_ranks.py")
LIMIT = 300.0
AROUND = ("cli", "config", "data", "models", "observe")
BESIDE = "cluster/membership/"
LIST_BEGINS, LIST_ENDS = "<!-- files of a step -->", "<!-- end of the files -->"
Functions = dict[str, list[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another one, to compare")
    options = parser.parse_args()
    ours = functions_of_a_step(ROOT)
    show("this checkout", ours)
    if options.against is not None:
        theirs = functions_of_a_step(options.against.resolve())
        print()
        show(str(options.against), theirs)
        print(f"\n{len(ours)} files / {len(theirs)} files = {len(ours) / len(theirs):.3f}")


def functions_of_a_step(checkout: Path) -> Functions:
    """Return the functions of a checkout's package that run in a step, by file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = LoggedProcess(
            [sys.executable, "-P", str(RANKS), name, str(free_port())],
            folder,
            {"PYTHONPATH": str(checkout)},
        )
        end = program.wait(LIMIT)
        assert end.status == 0, end.text
        results = [folder / f"{rank}.json" for rank in range(2)]
        return united([json.loads(result.read_text()) for result in results])


def united(found: Sequence[Mapping[str, Sequence[str]]]) -> Functions:
    """Unite what the ranks found, without the packages around the step."""
    counted = {file for one in found for file in one if not file.startswith(BESIDE)}
    files = sorted(file for file in counted if file.split("/")[0] not in AROUND)
    return {file: sorted({name for one in found for name in one.get(file, ())}) for file in files}


def files_listed(page: str) -> set[str] | None:
    """Return the files that a page names between the two marks of its list, if it has one."""
    _, begun, rest = page.partition(LIST_BEGINS)
    return set(re.findall(r"`([\w/]+\.py)`", rest.partition(LIST_ENDS)[0])) if begun else None


def show(title: str, functions: Functions) -> None:
    """Print each file with its number of functions, and the number of files."""
    print(f"{title}: functions that run in a step, by file of paceline")
    for file, names in functions.items():
        print(f"{len(names):5}  {file}")
    print(f"{sum(map(len, functions.values())):5}  in {len(functions)} files")


if __name__ == "__main__":
    main()
