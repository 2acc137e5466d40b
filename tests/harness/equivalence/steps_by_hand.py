"""Steps that a test makes by hand, as `with` blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from paceline.comm.peer_activities import PeerActivities
from paceline.data.batch_slice import BatchSlice
from paceline.run.steps import Steps


@contextmanager
def replica_step(replica: Any, number: int, weight: float, samples: int = 1) -> Iterator[None]:
    """Make a step of a replica, or of a group of several."""
    replica.begin(number, weight, samples)
    try:
        yield
        replica.end()
    except BaseException:
        replica.abandon()
        raise


@contextmanager
def run_step(steps: Steps, batch: BatchSlice, **fields: object) -> Iterator[Tensor]:
    """Make a step of a run; yield its sums."""
    try:
        sums = steps.begin(batch)
        yield sums
        steps.end(sums, **fields)
    except BaseException:
        steps.abandon()
        raise


@contextmanager
def active_step(activities: PeerActivities, number: int) -> Iterator[None]:
    """Report a step that is made."""
    activities.begin_step(number)
    yield
    activities.end_step(done=True)
