"""What a trace keeps, and how the ranks' clocks become one."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.comm.communicator import Communicator
from paceline.comm.window import PutEvent
from paceline.replica.pass_spans import watch_passes
from paceline.timeline import trace as module
from paceline.timeline.clock_offsets import Round, offsets, rounds
from paceline.timeline.timeline import Timeline
from paceline.timeline.trace import Trace
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.library.small_training import BATCH, network, plain_step, samples, sgd
from tests.harness.processes.run_folders import events
from tests.harness.processes.worlds import run_of

CPU = torch.device("cpu")
LIMIT = 40.0  # s, more than ranks that are threads wait
APART = 3600 * 10**9  # ns, rank by rank
Event = dict[str, Any]


def clock_of(rank: int) -> int:
    return time.monotonic_ns() + rank * APART


def test_clocks_that_are_apart_are_brought_together() -> None:
    def measured(c: Communicator) -> tuple[list[Round], float]:
        return rounds(c, lambda: clock_of(c.rank)), 0.0

    made, _ = run_ranks(3, measured)[0]
    shortest = min(one.received - one.sent for one in made)
    found = offsets(made, ["a", "b", "c"])
    assert found[0] == 0
    for rank in (1, 2):
        assert abs(found[rank] + rank * APART) <= shortest / 2 + 1


def test_the_shortest_round_counts_and_ranks_of_one_system_have_one_clock() -> None:
    made = [
        Round(sent=0, received=1000, times=(400, 99_900, 99_901, 7)),
        Round(sent=2000, received=2010, times=(2003, 52_006, 52_009, 2004)),
        Round(sent=3000, received=3500, times=(3400, 0, 0, 0)),
    ]
    assert offsets(made, ["x", "y", "y", "x"]) == [0, 2005 - 52_006, 2005 - 52_006, 0]


def slices(told: Event, rank: int) -> dict[str, tuple[float, float]]:
    """The slices of a rank: by their names, begin and end in microseconds."""
    return {
        event["name"]: (event["ts"], event["ts"] + event["dur"])
        for event in told["traceEvents"]
        if event["ph"] == "X" and event["pid"] == rank
    }


class Window:
    """Remembers its puts."""

    def __init__(self) -> None:
        self.moments: list[PutEvent] = []


def step(trace: Trace, timeline: Timeline, number: int, *puts: dict[str, object]) -> None:
    """Run a step with some puts, and tell of its end."""
    with timeline.span("step", step=number), timeline.span("train"):
        for put in puts:
            with timeline.span("put", window=0, notification=0, **put):
                pass
        with timeline.span("wait", bucket=0):
            pass
    trace.event("step", step=number)


def test_a_put_is_joined_with_its_arrival_across_clocks_hours_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    there, ready = (threading.Barrier(2, timeout=LIMIT) for _ in range(2))
    monkeypatch.setattr(module, "running_system", lambda: str(threading.get_ident()))

    def run(c: Communicator) -> None:
        timeline = Timeline(lambda: clock_of(c.rank))
        trace = Trace(path, range(5, 6), run_of(c, timeline=timeline), c.rank)
        window = Window()
        timeline.follow(0, window)
        trace.event("notifications", texts=["contribution of bucket 0"])
        trace.event("buckets", parameters=[("a", "b")])
        step(trace, timeline, 4, {"peer": 1 - c.rank, "value": 4})
        if c.rank == 0:
            step(trace, timeline, 5, {"peer": 1, "value": 5})
            window.moments += [PutEvent(False, 1, 0, v, clock_of(0)) for v in (4, 5)]
            there.wait()
        else:
            there.wait()
            window.moments += [PutEvent(True, 0, 0, v, clock_of(1)) for v in (4, 5)]
            step(trace, timeline, 5)
        ready.wait()
        assert not path.exists()
        step(trace, timeline, 6)
        trace.event("finish")  # it is written once

    run_ranks(2, run)
    told = json.loads(path.read_text())
    zero, one = slices(told, 0), slices(told, 1)
    assert sorted(zero) == [
        *("put contribution of bucket 0 to rank 1", "sent: contribution of bucket 0 to rank 1"),
        *("step 5", "train", "wait: bucket 0"),
    ]
    assert sorted(one) == [
        *("arrived: contribution of bucket 0 from rank 0", "step 5", "train", "wait: bucket 0"),
    ]
    put = zero["put contribution of bucket 0 to rank 1"][0]
    sent = zero["sent: contribution of bucket 0 to rank 1"][0]
    arrived = one["arrived: contribution of bucket 0 from rank 0"][0]
    assert zero["step 5"][0] == 0 < put < sent
    assert abs(arrived - sent) < 60e6  # µs: not the hours that the clocks are apart
    flows = [(e["ph"], e["pid"], e["ts"]) for e in told["traceEvents"] if e["ph"] in "stf"]
    assert sorted(flows) == [("f", 1, arrived), ("s", 0, put), ("t", 0, sent)]
    waits = [e["args"] for e in told["traceEvents"] if e.get("cat") == "wait"]
    assert waits == [{"bucket": 0, "parameters": ["a", "b"]}] * 2


def test_a_run_that_never_comes_to_the_traced_steps_leaves_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(c: Communicator) -> None:
        run = run_of(c)
        trace = Trace(tmp_path / "trace.json", range(5, 6), run, 0)
        for number in (0, 1, 7, 8):
            step(trace, run.timeline, number)
        trace.event("finish")

    run_ranks(2, run)
    assert not list(tmp_path.iterdir())
    text = "--trace_steps 5:5: none of these steps was run, so there is no trace."
    assert capsys.readouterr().err == f"paceline: {text}\n"


def test_a_scripts_steps_are_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with paceline.join(tmp_path, trace_steps="1:2") as world:
        model = network()
        model, optimizer = paceline.parallelize(model, sgd(model), world)
        for x, y in paceline.loader(samples(), BATCH, world):
            with world.step():
                plain_step(model, x, y, optimizer, world)
    path = tmp_path / "trace.steps1-2.json"
    assert capsys.readouterr().err == f"paceline: the trace is in {path}.\n"
    told = json.loads(path.read_text())
    names = [e["name"] for e in told["traceEvents"] if e["ph"] == "X"]
    assert [name for name in names if name.startswith("step")] == ["step 1", "step 2"]
    assert (names.count("forward"), names.count("backward")) == (2, 2)
    assert not model._forward_hooks  # nothing is left behind
    (step, *_) = (e for e in events(tmp_path) if e["event"] == "step")
    assert step["compute_ms"] > 0


class Spans(Timeline):
    """Writes down what begins and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def span(self, name: str, **fields: object) -> Any:
        seen = self.seen

        class Span:
            def __enter__(self) -> None:
                seen.append(f"{name} begins")

            def __exit__(self, *_: object) -> None:
                seen.append(f"{name} ends")

        return Span()


@pytest.mark.parametrize("times", [1, 2])
def test_forwards_and_backwards_are_measured(times: int) -> None:
    model, spans = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), Spans()
    last = model[0].weight
    last.register_post_accumulate_grad_hook(lambda _: spans.seen.append("gradient"))
    undo = watch_passes(model, spans)
    for _ in range(times):
        model(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        model(torch.ones(2, 3))
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    undo()
    model(torch.ones(2, 3)).sum().backward()
    forward = ["forward begins", "forward ends"]
    backward = ["backward begins", "gradient", "backward ends"]
    assert spans.seen == [*(forward + backward) * times, *forward, *forward, "gradient"]
