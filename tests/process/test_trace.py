"""The trace of a real run: each put arrives later, on the one clock, and waits are within steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes.command import Command
from tests.harness.processes.run_folders import events, write_net

WORDS = (
    *("train", "--train_data", "null", "--epoch_size", "60", "--image_size", "32"),
    *("--augment", "none", "--model", "net:plain", "--run_id", "r"),
    *("--num_labels", "3", "--num_epochs", "1", "--bucket_mb", "0.001"),
)
STEPS = range(3, 7)
Event = dict[str, Any]


def trained(folder: Path, *words: str, machines: int = 1) -> Path:
    """Train 10 steps with two workers; return machine 0's run folder."""
    write_net(folder)
    (folder / "meet").mkdir()
    commands = []
    for machine in range(machines):
        place = ["--num_workers", "2", "--batch_size", "6"]
        if machines > 1:
            place = ["--num_shards", "2", "--shard_id", str(machine), "--batch_size", "3"]
            place += ["--file_store_path", str(folder / "meet"), "--output_dir", f"runs{machine}"]
        commands.append(Command(*WORDS, *place, *words, folder=folder))
    for machine, command in enumerate(commands):
        ended = command.wait()
        assert ended.status == 0, ended.text
        assert ended.text.count("paceline: the trace is in ") == (machine == 0)
    return folder / ("runs0" if machines > 1 else "runs") / "r"


def trace_of(run: Path, name: str = "trace.steps3-6.json") -> list[Event]:
    told = json.loads((run / name).read_text())
    assert told["distributedInfo"] == {"world_size": 2}
    found: list[Event] = told["traceEvents"]
    return found


def slices(trace: list[Event], category: str) -> Iterator[Event]:
    return (event for event in trace if event["ph"] == "X" and event["cat"] == category)


def within(inner: Event, outer: Event) -> bool:
    """Return whether a slice lies in another of its thread."""
    same = (inner["pid"], inner["tid"]) == (outer["pid"], outer["tid"])
    ends = [slice["ts"] + slice["dur"] for slice in (inner, outer)]
    return bool(same and outer["ts"] <= inner["ts"] and ends[0] <= ends[1] + 1e-3)


def require_nested(trace: list[Event], category: str, *inside: str) -> None:
    """Require some slices of a category, each in one of some others."""
    outer = [slice for each in inside for slice in slices(trace, each)]
    inner = list(slices(trace, category))
    assert inner
    for slice in inner:
        assert any(within(slice, one) for one in outer), slice


@pytest.mark.parametrize("machines", [1, 2])
def test_every_put_of_the_traced_steps_has_left_and_arrived(tmp_path: Path, machines: int) -> None:
    words = ("--sync", "notified", "--trace_steps", "3:6")
    trace = trace_of(trained(tmp_path, *words, machines=machines))
    puts, sent, arrived = (list(slices(trace, cat)) for cat in ("put", "sent", "arrived"))
    assert len(puts) == len(sent) == len(arrived) > 0

    flows: dict[int, dict[str, Event]] = {}
    for event in trace:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], {})[event["ph"]] = event
    assert len(flows) == len(puts)
    for flow in flows.values():
        queued, left, came = flow["s"], flow["t"], flow["f"]
        assert queued["ts"] < left["ts"]
        assert queued["ts"] < came["ts"]
        assert queued["pid"] == left["pid"] != came["pid"]

    steps = {(s["pid"], s["name"]) for s in slices(trace, "step")}
    assert steps == {(rank, f"step {number}") for rank in range(2) for number in STEPS}
    threads = {e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert threads == {"main", "owner", "network"}
    assert any(slice["tid"] == 1 for slice in slices(trace, "wait for notification"))
    require_nested(trace, "wait", "step")
    require_nested(trace, "wait for rank", "wait")
    require_nested(trace, "update", "step")
    require_nested(trace, "forward", "train")
    require_nested(trace, "backward", "train")
    require_nested(trace, "send", "backward")
    assert any("body.4.weight" in s["args"]["parameters"] for s in slices(trace, "wait"))


def test_a_run_without_puts_that_ends_in_the_traced_steps_has_a_trace_too(tmp_path: Path) -> None:
    run = trained(tmp_path, "--sync", "allreduce", "--trace_steps", "8:99")
    trace = trace_of(run, "trace.steps8-99.json")
    steps = sorted((s["pid"], s["name"]) for s in slices(trace, "step"))
    assert steps == [(0, "step 8"), (0, "step 9"), (1, "step 8"), (1, "step 9")]
    require_nested(trace, "wait", "step", "settle")  # the last ones at the epoch's end
    require_nested(trace, "send", "backward")

    found = events(run, rank=1)
    (buckets,) = (event["parameters"] for event in found if event["event"] == "buckets")
    names = {name for names in buckets for name in names}
    assert names == {f"body.{layer}.{what}" for layer in (0, 4) for what in ("weight", "bias")}
    for step in (event for event in found if event["event"] == "step"):
        assert step["compute_ms"] > 0
        assert sum(step["waits_ms"].values()) <= step["exposed_ms"] + 0.01 * len(buckets)
        assert step["sent"] == step["received"] > 0
