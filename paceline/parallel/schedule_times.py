"""Times of a schedule: when each stage runs which task, and for which share of a step it is idle.

A stage runs its tasks in their order, each once what it receives has arrived. It sends while it
computes; a link carries one microbatch's activations at a time towards the last stage, and one's
gradients at a time towards the first. So the end of the last task is the length of the critical
path through tasks and links: no runtime of this schedule is faster on these parts and links.

With equal stages and nothing to send, a step of GPipe and of 1F1B takes (M + P − 1)(T_F + T_B), and
each stage is idle for (P − 1) / (M + P − 1) of it, which is the bubble; one of ZB-H1 takes
M(T_F + T_I + T_W) + (P − 1)(T_F + T_I − T_W), where T_W is at most T_I.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.parallel.schedules import Pass, Schedule, Task

PassSeconds = Mapping[Pass, float]
"""Seconds of each kind of pass of a stage over one microbatch."""


@dataclass(frozen=True)
class Link:
    """Link between a stage and the next one, the same both ways.

    Attributes:
        sending: seconds that a microbatch's activations, or their gradients, occupy it.
        latency: seconds from then until they have arrived.
    """

    sending: float = 0.0
    latency: float = 0.0


@dataclass(frozen=True)
class Span:
    """Span of a task, simulated or measured: in seconds, by one clock for all stages."""

    stage: int
    task: Task
    start: float
    end: float


def simulate(
    schedule: Schedule, pass_seconds: Sequence[PassSeconds], links: Sequence[Link]
) -> list[Span]:
    """Return the spans of all tasks, given each stage's passes and its link to the next stage."""
    queues = [deque(tasks) for tasks in schedule]
    now = [0.0] * len(schedule)
    arrivals: dict[tuple[int, Task], float] = {}  # of what a task of a stage receives
    link_free: dict[tuple[int, int], float] = defaultdict(float)  # by sender and receiver
    spans = []

    def ready(stage: int) -> bool:
        task = queues[stage][0]
        sender = _neighbour(stage, task, -1)
        return sender not in range(len(schedule)) or (stage, task) in arrivals

    while running := [stage for stage, queue in enumerate(queues) if queue and ready(stage)]:
        for stage in running:
            task = queues[stage].popleft()
            start = max(now[stage], arrivals.get((stage, task), 0.0))
            end = start + pass_seconds[stage][task.kind]
            now[stage] = end
            spans.append(Span(stage, task, start, end))
            receiver = _neighbour(stage, task, 1)
            if receiver in range(len(schedule)):
                link = links[min(stage, receiver)]
                sent = max(end, link_free[stage, receiver]) + link.sending
                link_free[stage, receiver] = sent
                arrivals[receiver, task] = sent + link.latency
    assert not any(queues), "each stage waits for another"
    return spans


def step_seconds(spans: Sequence[Span]) -> float:
    """Return the seconds from the first task's start to the last one's end."""
    return max(span.end for span in spans) - min(span.start for span in spans)


def idle_shares(spans: Sequence[Span]) -> list[float]:
    """Return for which share of a step each stage runs no task: its bubble."""
    busy: dict[int, float] = defaultdict(float)
    for span in spans:
        busy[span.stage] += span.end - span.start
    whole = step_seconds(spans)
    return [1 - busy[stage] / whole for stage in sorted(busy)]


def _neighbour(stage: int, task: Task, way: int) -> int:
    """Return the stage that receives a task's result (1), or sends what it needs (-1); or -1."""
    if task.kind == "backward_weight":
        return -1
    return stage + way if task.kind == "forward" else stage - way
