"""What a run lost in this start: its lost members, why, and the seconds that each loss cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.cluster.print_message import print_message
from paceline.cluster.supervision.requests.run_status import MemberLoss
from paceline.generation.run import Leadership
from paceline.recorder import NullRecorder


class LossHistory(NullRecorder):
    """Recorder of the lost members, and of the time from a loss to the first step that is new.

    Events, and the fields that it reads:
        change: generation, lost, causes, detected_at (by `clock`).
        step: step.

    Args:
        leadership: says whether this process is the leader, which prints what losses cost.
        clock: returns seconds since an arbitrary origin.
    """

    def __init__(self, leadership: Leadership, clock: Callable[[], float] = time.monotonic) -> None:
        self._leadership = leadership
        self._clock = clock
        self._lock = threading.Lock()  # over the losses: the main thread adds, another one reads
        self._losses: list[MemberLoss] = []
        self._newest = 0  # the generation of the newest change
        self._open_since: float | None = None  # when the first loss was detected that still costs
        self._reached = -1  # the newest step that has ended

    @property
    def losses(self) -> tuple[MemberLoss, ...]:
        """The lost members, the earliest first."""
        with self._lock:
            return tuple(self._losses)

    def event(self, name: str, **fields: Any) -> None:
        """Add lost members, or end the time that they cost."""
        if name == "change":
            self._change(**fields)
        elif name == "step" and fields["step"] > self._reached:
            self._reached = fields["step"]
            if self._open_since is not None:
                self._close(self._clock() - self._open_since)

    def _change(
        self,
        *,
        generation: int,
        lost: list[str],
        causes: list[str],
        detected_at: float,
        **_: object,
    ) -> None:
        if self._open_since is None:
            self._open_since = detected_at
        self._newest = generation
        with self._lock:
            self._losses += [
                MemberLoss(member=member, generation=generation - 1, cause=cause)
                for member, cause in zip(lost, causes, strict=True)
            ]

    def _close(self, seconds: float) -> None:
        self._open_since = None
        with self._lock:
            self._losses = [
                replace(loss, seconds=seconds) if loss.seconds is None else loss
                for loss in self._losses
            ]
        if self._leadership.leads:
            print_message(
                f"Generation {self._newest} made its first new step {seconds:.2f} s after the loss "
                "was detected."
            )
