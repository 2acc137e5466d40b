"""Section `waits` of `gpu.py`: three steps in which no operation may wait for the GPU.

torch's debug mode raises an error at each operation that waits: `item`, `tolist`, a copy from or to
pageable memory. It is on from the beginning of one step's forward to that of the third after it, in
a script's loop and in `paceline train`, in a world of one and in one of two processes on one GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from gpu_jobs import HERE, PACELINE, Job, JobFailed, Jobs
from gpu_models import DONE
from gpu_rows import Row, Setting, failing_alone, not_measured
from photographs import write_photographs

BATCH, STEPS = 32, 24  # images over all ranks, steps of an epoch
NAME = "three steps of {} don't wait, {}"


def waits(setting: Setting) -> Iterator[Row]:
    """Yield a row for each kind of loop, and each size of the world."""
    loops, worlds = ("a script", "paceline train"), ("one process", "two processes")
    if setting.small:
        for loop in loops:
            for world in worlds:
                yield not_measured(NAME.format(loop, world), "a CPU's operations wait for nothing")
        return
    database = setting.folder / "photographs"
    write_photographs(database, BATCH * STEPS, distinct=8)
    rows: list[Row] = []
    script = [sys.executable, str(HERE / "gpu_loop.py"), "--device", "cuda:0", "waits"]
    script += ["--out", str(setting.folder)]
    train = [
        *(
            *PACELINE,
            "train",
            "--train_data",
            str(database),
            "--model",
            "gpu_models:watched_resnet18",
        ),
        *("--dtype", "bfloat16", "--image_size", "64", "--scale", "73", "--num_epochs", "1"),
        *("--gpus", "0", "--output_dir", str(setting.folder / "runs")),
    ]
    meeting = setting.folder / "meeting"
    meeting.mkdir()
    pair = ["--num_shards", "2", "--run_id", "two", "--file_store_path", str(meeting)]
    pair += ["--sync", "notified", "--batch_size", str(BATCH // 2)]
    with Jobs(setting) as jobs:
        started = [
            [jobs.start("script1", script)],
            [jobs.start("script2", [*PACELINE, "launch", "-n", "2", "--", *script])],
            [jobs.start("train1", [*train, "--run_id", "one", "--batch_size", str(BATCH)])],
            [jobs.start(f"train2-{n}", [*train, *pair, "--shard_id", str(n)]) for n in range(2)],
        ]
        names = [NAME.format(loop, world) for loop in loops for world in worlds]
        for name, group in zip(names, started, strict=True):
            with failing_alone(rows, name):
                rows.append(_row(name, group, ranks=2 if "two" in name else 1))
    yield from rows


def _row(name: str, group: list[Job], ranks: int) -> Row:
    for job in group:
        job.require_success()
    found = sum(job.text.count(DONE) for job in group)
    if found != ranks:
        raise JobFailed(f"{found} of {ranks} ranks made the three steps")
    return Row(name=name, measured="no wait", correct=True)
