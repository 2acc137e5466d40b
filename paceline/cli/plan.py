"""`paceline plan --stages P`: draws the schedules of a pipeline, and names the fastest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.cli.flags import parse
from paceline.config.plan import PlanConfig
from paceline.parallel.schedule_picture import column_seconds, draw, label
from paceline.parallel.schedule_times import (
    Link,
    PassSeconds,
    Span,
    idle_shares,
    simulate,
    step_seconds,
)
from paceline.parallel.schedules import SCHEDULES, activations_alive, make_schedule

_DESCRIPTION = """\
Show the schedules of a pipeline, and which is the fastest.

Nothing runs: passes and transfers take the times that are given.

Examples:
  paceline plan --stages 4
  paceline plan --stages 2 --microbatches 4 --schedule 1f1b
  paceline plan --stages 2 --forward_ms 40 52 --transfer_ms 30"""
_HEAD = "stage    idle  alive  "
_LEGEND = """\
F: a forward pass. B: a backward pass; I and W: its inputs' and its weights' part.
The number is the microbatch's. Dots: idle. A column: {:.3g} ms.
alive: of how many microbatches a stage has activations at once."""


@dataclass(frozen=True)
class _Plan:
    """A schedule's spans, and by stage of how many microbatches it has activations at once."""

    spans: list[Span]
    alive: list[int]

    @property
    def cost(self) -> tuple[float, int]:
        """Milliseconds of a step; where two are equal, fewer activations are better."""
        return round(1e3 * step_seconds(self.spans), 6), sum(self.alive)


def main(argv: Sequence[str]) -> int:
    """Run the command after `paceline plan`; return its exit status.

    Raises:
        ConfigError: a number breaks a rule, or there are fewer microbatches than stages.
        SystemExit: help was requested (0), or the arguments are wrong (2).
    """
    config = parse(PlanConfig, argv, prog="paceline plan", description=_DESCRIPTION)
    plans = {name: _plan(name, config) for name in SCHEDULES}
    best = min(plans, key=lambda name: plans[name].cost)
    shown = {name: plans[name] for name in plans if config.schedule in (None, name)}
    if config.json:
        print(json.dumps({"best": best, "schedules": {n: _as_json(p) for n, p in shown.items()}}))
        return 0
    width = max(shutil.get_terminal_size().columns - len(_HEAD), 20)
    column = max(column_seconds(plan.spans, width) for plan in shown.values())
    for name, plan in shown.items():
        print("\n".join(_table(name, plan, column)), end="\n\n")
    print(_LEGEND.format(1e3 * column))
    print(f"Fastest: {best}, with {plans[best].cost[0]:,.6g} ms a step.")
    return 0


def _plan(name: str, config: PlanConfig) -> _Plan:
    schedule = make_schedule(name, config.stages, config.microbatch_count)
    links = [Link(sending=transfer / 1e3) for transfer in config.links_ms]
    spans = simulate(schedule, [_seconds(*passes) for passes in config.passes_ms], links)
    return _Plan(spans, [activations_alive(tasks) for tasks in schedule])


def _seconds(forward: float, backward: float, weight: float) -> PassSeconds:
    return {
        "forward": forward / 1e3,
        "backward": backward / 1e3,
        "backward_input": (backward - weight) / 1e3,
        "backward_weight": weight / 1e3,
    }


def _table(name: str, plan: _Plan, column: float) -> Iterator[str]:
    idle = idle_shares(plan.spans)
    yield f"{name}: {plan.cost[0]:,.6g} ms a step, a bubble of {fmean(idle):.1%}"
    yield _HEAD.rstrip()
    for stage, row in enumerate(draw(plan.spans, column)):
        yield f"{stage:5}{idle[stage]:8.1%}{plan.alive[stage]:7}  {row}"


def _as_json(plan: _Plan) -> dict[str, object]:
    tasks = [
        {"stage": s.stage, "task": label(s), "start_ms": 1e3 * s.start, "end_ms": 1e3 * s.end}
        for s in plan.spans
    ]
    idle = idle_shares(plan.spans)
    return {"step_ms": plan.cost[0], "idle": idle, "activations_alive": plan.alive, "tasks": tasks}
