"""Section `correctness` of `gpu.py`: small loops by the library, compared with plain torch.

All processes start at once. In float64 the results differ from plain torch's on the CPU by rounding
alone. A run that was killed and resumed has the bits of one that wasn't.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from gpu_jobs import HERE, PACELINE, Job, JobFailed, Jobs
from gpu_loop import CASES, plain, train
from gpu_rows import Row, Setting, failing_alone
from torch import Tensor

EXACT = 1e-12  # float64, up to the order of summation
HALF = 5e-3  # float16 rounds products to 11 bits, differently in a smaller batch
LOSSY = 2e-2  # a lossy wire, with error feedback
TOGETHER = ("float64", "fp16", "average", "auto")  # in the same two processes
WIRES = ("bf16-wire", "int8-wire")  # between two machines, as which two launchers count

Result = dict[str, Any]


def correctness(setting: Setting) -> Iterator[Row]:
    """Yield a row a way to train."""
    rows: list[Row] = []
    device, where = setting.device, setting.device.type
    with Jobs(setting) as jobs:
        launch = partial(_launch, jobs, setting)
        together = [launch("two", TOGETHER)]
        wires = [launch(f"machine{n}", WIRES, machine=n) for n in range(2)]
        lost = [launch("lost", ["lost"])]
        first = _resume(jobs, setting, 1)
        exact = plain(CASES["float64"], torch.device("cpu"))
        alone: Result = {}
        for kind in dict.fromkeys((where, "cpu")):
            name = f"float64, one process on {kind}, beside plain torch on cpu"
            with failing_alone(rows, name):
                result = train("float64", kind)
                alone = alone or result
                rows.append(_row(name, [result], exact, EXACT))
        half = plain(CASES["fp16"], device)
        name = "fp16 with GradScaler, one process"
        with failing_alone(rows, name):
            rows.append(_scaled(name, [train("fp16", where)], half))
        yield from _taken(rows)
        with failing_alone(rows, "resumed after kill -9: the same bits"):
            rows.append(_resumed(jobs, setting, first, alone))
        yield from _taken(rows)
        without_momentum = plain(CASES["average"], torch.device("cpu"))
        for name, of, compare in (
            ("float64, two processes, notified", "float64", partial(_row, reference=exact)),
            ("fp16 with GradScaler, two processes", "fp16", partial(_scaled, reference=half)),
            ("average, two processes", "average", partial(_row, reference=without_momentum)),
            ("auto, two processes", "auto", partial(_row, reference=exact)),
        ):
            with failing_alone(rows, name):
                rows.append(compare(name, _results(together, setting, of)))
            yield from _taken(rows)
        uncompressed = plain(CASES["fp32"], device)
        for of in WIRES:
            name = f"wire {of.partition('-')[0]}, two processes over TCP"
            with failing_alone(rows, name):
                rows.append(_lossy(name, _results(wires, setting, of), uncompressed))
        name = "one of two processes killed, the other continues"
        with failing_alone(rows, name):
            (result,) = _results(lost, setting, "lost", ranks=1)
            if result["world_size"] != 1:
                raise JobFailed("the process wasn't killed")
            rows.append(_row(name, [result], exact, EXACT))
    yield from rows


def _launch(
    jobs: Jobs, setting: Setting, name: str, cases: Sequence[str], machine: int | None = None
) -> Job:
    """Start two processes with the loop, or one of two machines with one each."""
    world = ["-n", "2"]
    if machine is not None:
        meeting = setting.folder / "meeting"
        meeting.mkdir(exist_ok=True)
        world = ["-n", "1", "--num_shards", "2", "--shard_id", str(machine), "--run_id", "wires"]
        world += ["--file_store_path", str(meeting)]
    return jobs.start(name, [*PACELINE, "launch", *world, "--", *_loop(setting, cases)])


def _loop(setting: Setting, cases: Sequence[str]) -> list[str]:
    device = "cpu" if setting.small else "cuda:0"  # of all ranks
    script = [sys.executable, str(HERE / "gpu_loop.py")]
    return [*script, "--device", device, "--out", str(setting.folder), *cases]


def _resume(jobs: Jobs, setting: Setting, number: int) -> Job:
    run = str(setting.folder / "resumed")
    return jobs.start(f"resumed{number}", [*_loop(setting, ["resumed"]), "--run", run])


def _resumed(jobs: Jobs, setting: Setting, first: Job, alone: Result) -> Row:
    """Wait for the kill, start the run again, and compare it with one that wasn't killed."""
    if first.wait() == 0:
        raise JobFailed("the run wasn't killed")
    (result,) = _results([_resume(jobs, setting, 2)], setting, "resumed", ranks=1)
    if not result["began"]:
        raise JobFailed("the run began anew")
    return _row("resumed after kill -9: the same bits", [result], alone, 0.0)


def _results(jobs: Sequence[Job], setting: Setting, case: str, ranks: int = 2) -> list[Result]:
    """Wait for the processes; return what each rank has trained, though a later case failed."""
    failures = []
    for job in jobs:
        try:
            job.require_success()
        except JobFailed as failed:
            failures.append(failed)
    paths = [setting.folder / f"{case}.{rank}.pt" for rank in range(ranks)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise next(iter(failures), JobFailed(f"no rank wrote {missing[0]}"))
    return [torch.load(path, weights_only=True) for path in paths]


def _row(
    name: str,
    results: Sequence[Result],
    reference: Result,
    limit: float = EXACT,
    check: Callable[[float], bool] = lambda found: True,
) -> Row:
    """Compare the weights of all ranks with the reference."""
    found = max(_difference(result["weights"], reference["weights"]) for result in results)
    return Row(
        name=name,
        value=found,
        measured=f"differs by {found:.1e}; limit {limit:g}",
        correct=found <= limit and _equal(results) and check(found),
    )


def _scaled(name: str, results: Sequence[Result], reference: Result) -> Row:
    """Compare the loss scale, too, which the first step lowered."""
    row = _row(name, results, reference, HALF)
    scales = {result["scale"] for result in (*results, reference)}
    if len(scales) > 1:
        raise JobFailed(f"the loss scales differ: {sorted(scales)}")
    return row


def _lossy(name: str, results: Sequence[Result], reference: Result) -> Row:
    """Require that the wire lost something, but not much."""
    return _row(name, results, reference, LOSSY, check=lambda found: found > 1e-7)


def _difference(found: Tensor, reference: Tensor) -> float:
    """Return the largest difference, as a part of the largest value."""
    return float((found - reference).abs().max() / reference.abs().max())


def _equal(results: Sequence[Result]) -> bool:
    """Return whether all ranks have the same bits."""
    return all(torch.equal(result["weights"], results[0]["weights"]) for result in results)


def _taken(rows: list[Row]) -> Iterator[Row]:
    """Yield the rows up to now, and remove them."""
    while rows:
        yield rows.pop(0)
