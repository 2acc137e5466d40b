"""Schedules of a pipeline: in which order each stage runs its tasks.

A task is one pass of a stage over one microbatch: forward (F) or backward. A backward pass is whole
(B), or divided into the gradients of inputs (I), for which the stage before waits, and those of
weights (W), for which no stage does. With three stages and four microbatches:

    gpipe       F0 F1 F2 F3  B0 B1 B2 B3            on each stage: the forward passes come first
    1f1b        F0 F1 F2  B0 F3 B1 B2 B3            stage 0
                F0 F1     B0 F2 B1 F3 B2 B3         stage 1
                F0        B0 F1 B1 F2 B2 F3 B3      stage 2
    zb-h1       F0 F1 F2  I0 W0 F3 I1 W1 I2 W2 I3 W3
                F0 F1     I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
                F0        I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

GPipe (Huang et al., 2019) keeps the activations of all M microbatches; 1F1B (PipeDream-Flush,
Narayanan et al., 2021) of P − s on stage s, and is as long: (P − 1)(T_F + T_B) longer than the
passes of one stage. ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", 2024) begins as many
microbatches as 1F1B and holds the weights' passes of stage s back by s microbatches: no stage has
the activations of more than P, and the step is (P − 1)(T_F + T_I − T_W) longer than the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError, many

Pass = Literal["forward", "backward", "backward_input", "backward_weight"]


@dataclass(frozen=True)
class Task:
    """One pass of a stage over one microbatch, counted from 0."""

    kind: Pass
    microbatch: int


Schedule = tuple[tuple[Task, ...], ...]
"""By stage: its tasks, in the order in which it runs them."""


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Return the schedule with all forward passes before the first backward pass."""
    _check(stages, microbatches)
    tasks = (*_passes("forward", microbatches), *_passes("backward", microbatches))
    return (tasks,) * stages


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Return the schedule in which forward and backward passes alternate, once P − s have begun."""
    _check(stages, microbatches)
    backward = [(task,) for task in _passes("backward", microbatches)]
    return tuple(_alternating(stages - stage, backward) for stage in range(stages))


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Return 1F1B with divided backward; stage s computes weight gradients s microbatches late."""
    _check(stages, microbatches)
    inputs = _passes("backward_input", microbatches)
    weights = _passes("backward_weight", microbatches)
    schedule = []
    for stage in range(stages):
        early = [(task,) for task in inputs[:stage]]
        backward = [*early, *zip(inputs[stage:], weights, strict=False)]
        late = weights[microbatches - stage :]
        schedule.append(_alternating(stages - stage, backward) + late)
    return tuple(schedule)


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
}


def make_schedule(name: str, stages: int, microbatches: int) -> Schedule:
    """Return the schedule of a name.

    Raises:
        ConfigError: there is none, no stage, or fewer microbatches than stages, as `SCHEDULES`; or
            the number of microbatches is no whole number.
    """
    if name not in [*SCHEDULES]:  # a list has no hash
        rule = f"must be one of {', '.join(SCHEDULES)}"
        raise ConfigError(flag="schedule", value=name, rule=rule)
    return SCHEDULES[name](stages, microbatches)


def activations_alive(tasks: Iterable[Task]) -> int:
    """Return of how many microbatches a stage has activations at once, at most.

    A forward pass makes them; the backward pass, or that of the weights, drops them.
    """
    alive = 0
    most = 0
    for task in tasks:
        alive += (task.kind == "forward") - (task.kind in ("backward", "backward_weight"))
        most = max(most, alive)
    return most


def _passes(kind: Pass, microbatches: int) -> tuple[Task, ...]:
    return tuple(Task(kind, microbatch) for microbatch in range(microbatches))


def _alternating(ahead: int, backward: Sequence[Sequence[Task]]) -> tuple[Task, ...]:
    """Begin with some forward passes, then follow the backward of a microbatch by one forward."""
    forward = _passes("forward", len(backward))
    tasks = [*forward[:ahead]]
    for microbatch, backward_tasks in enumerate(backward, ahead):
        tasks += backward_tasks
        tasks += forward[microbatch : microbatch + 1]
    return tuple(tasks)


def _check(stages: int, microbatches: int) -> None:
    if stages < 1:
        raise ConfigError(flag="stages", value=stages, rule="must be at least 1")
    if not hasattr(microbatches, "__index__"):
        raise ConfigError(flag="microbatches", value=microbatches, rule="must be a whole number")
    if microbatches < stages:
        idle = (stages - 1) / (max(microbatches, 1) + stages - 1)
        raise ConfigError(
            flag="microbatches",
            value=microbatches,
            rule=f"must be at least the number of stages, {stages}: with fewer, a stage is idle "
            f"for {idle:.0%} of a step (the bubble), or for longer",
            remedy=f"use {many(4 * stages, 'microbatch')}, with which it is "
            f"{(stages - 1) / (5 * stages - 1):.0%}",
        )
