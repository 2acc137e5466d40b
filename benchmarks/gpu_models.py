r"""Models for `paceline train --model gpu_models:NAME` that let `gpu.py` into a run.

A hook before each forward in training is called once a step, on the thread of the step. One lets
torch raise an error where the host waits for the GPU, for three steps. The other is a gate: the
run makes steps while the benchmark lets it, so that several runs, each with all that belongs to the
command, take turns on one machine:

    benchmark                            run
              ◀── connection ──          at the first forward
       "1.5 1.0\n" ──▶                   trains 1.5 s untimed, then 1.0 s and to the end of a step
              ◀── "0.0643\n" ──          seconds a step; waits in the next forward
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TextIO

import torch
from torch import nn

from paceline.models.zoo import build_model

GATE = "GPU_BENCHMARK_GATE"  # the environment variable with the path of the benchmark's socket
WATCHED = range(12, 15)  # steps
DONE = "three steps without a wait"


class Gate:
    """Gate of a run: each call is the beginning of a step, which may have to wait."""

    def __init__(self) -> None:
        self._line: TextIO | None = None
        self._until = 0.0  # the end of the part of a turn that is under way
        self._timed: float | None = None  # the seconds of the next part; None: this one is timed
        self._began = 0.0
        self._steps = 0  # of this part

    def __call__(self, model: nn.Module, inputs: object) -> None:
        if not model.training:
            return
        if self._line is None:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(os.environ[GATE])
            self._line = connection.makefile("rw", buffering=1)
            self._await_turn()
            return
        self._steps += 1
        if time.monotonic() < self._until:
            return
        _synchronize()
        now = time.monotonic()
        if self._timed is not None:
            self._began = now
            self._until = now + self._timed
            self._timed = None
            self._steps = 0
            return
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # another run needs the memory of this one's activations
        self._line.write(f"{(now - self._began) / self._steps}\n")
        self._await_turn()

    def _await_turn(self) -> None:
        assert self._line is not None
        line = self._line.readline()
        if not line:  # the benchmark has ended
            os._exit(0)
        untimed, timed = map(float, line.split())
        self._until = time.monotonic() + untimed
        self._timed = timed


class Watch:
    """Lets torch raise an error where an operation of the steps `WATCHED` waits for the GPU."""

    def __init__(self) -> None:
        self._steps = 0

    def __call__(self, model: nn.Module, inputs: object) -> None:
        if self._steps == WATCHED.start:
            torch.cuda.set_sync_debug_mode("error")
        if self._steps == WATCHED.stop:
            torch.cuda.set_sync_debug_mode("default")
            print(DONE, flush=True)
        self._steps += 1


def pooled(num_labels: int) -> nn.Module:
    """Make a model that computes next to nothing."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_labels))


def _zoo(name: str, num_labels: int) -> nn.Module:
    return build_model(name, num_labels=num_labels, num_channels=3)


def _hooked(
    make: Callable[[int], nn.Module], hook: Callable[[], Callable[..., None]], num_labels: int
) -> nn.Module:
    model = make(num_labels)
    model.register_forward_pre_hook(hook())
    return model


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


gated_resnet50 = partial(_hooked, partial(_zoo, "resnet50"), Gate)
gated_pooled = partial(_hooked, pooled, Gate)
watched_resnet18 = partial(_hooked, partial(_zoo, "resnet18"), Watch)
