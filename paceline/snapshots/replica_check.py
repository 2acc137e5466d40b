"""Replica check: compares checksums of the ranks' states, as often as costs 0.1% of the time.

    step n        its snapshot is held (or its state is summed where none is taken)
                  end: checksums, send their code in the summary of step n
    step n + 2    boundary: the codes in summary n differ: compare entry by entry, and stop

All ranks check the same steps: those of the first snapshots from `due` on. Rank 0 measures, and its
interval reaches all ranks in a summary. What is saved as a checkpoint is checked before.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Sequence
from statistics import median

import torch

from paceline.comm.communicator import gather_bytes, gather_counts, total
from paceline.errors import ConfigError, ReplicasDiffer, many
from paceline.generation.run import Run
from paceline.generation.summaries import StepSummary, all_equal
from paceline.replica.checksums import (
    ChecksumParts,
    Checksums,
    Parts,
    checksums_of,
    code_of,
    difference,
    name_ranks,
)

_COST = 0.0007  # of the time; what is promised is 0.1%, with the checks of what is saved
_COUNTED = 5  # checks whose times are retained
_CHANGE = 1.2  # factor by which an interval changes before it is sent


class ReplicaCheck:
    """Replica check of one rank.

    Args:
        run: the run, whose present ranks are compared.
        enabled: whether replicas are checked.

    Attributes:
        due: the step from which on the next state is checked, the same on all ranks; infinite if
            none is.
    """

    def __init__(self, run: Run, *, enabled: bool = True) -> None:
        self._run = run
        self.due: float = 0 if enabled else math.inf
        self._equal: int | None = None  # completed steps of the newest state that was equal
        self._interval = 1  # in steps
        self._last = 0  # the last step that was checked
        self._first = 0  # step of the generation
        self._sums: dict[int, Checksums] = {}  # whose codes haven't been compared, by step
        self._seconds: deque[float] = deque(maxlen=_COUNTED)
        self._time = 0.0  # of the last check

    @property
    def enabled(self) -> bool:
        """Whether replicas are checked; the same on all ranks."""
        return self.due < math.inf

    def begin_generation(self, number: int) -> None:
        """Forget the states that weren't compared; the next one is checked."""
        self._sums.clear()
        if self.enabled:
            self.due = number
            self._interval = 1
            self._last = number
            self._first = number
            self._time = 0.0

    def require(self, step: int) -> None:
        """Check the state before a step, which will be saved."""
        if self.enabled:
            self.due = min(self.due, step)

    def checksum_code(
        self, step: int, state: Parts | ChecksumParts, spent: float = 0.0
    ) -> tuple[int, int]:
        """Check the state before a step.

        Args:
            state: the parts of its snapshot, or what has received them.
            spent: the seconds that receiving them took.

        Returns:
            the code of its checksums; and the interval that rank 0 asks for, 0 for none.
        """
        began = time.monotonic()
        with self._run.timeline.span("check"), torch.no_grad():
            self._sums[step] = sums = _checksums(state)
            code = code_of(sums)
        now = time.monotonic()
        steps = step - self._last
        self._last = step
        self._schedule()
        interval = 0
        if self._time and steps:  # not the first, which is slower
            self._seconds.append(spent + now - began)
            wanted = math.ceil(median(self._seconds) * steps / (_COST * (now - self._time)))
            if not self._interval / _CHANGE <= wanted <= self._interval * _CHANGE:
                interval = wanted
        self._time = now
        return code, interval if self._run.leads else 0

    def add_loaded(self, step: int, loaded: Checksums) -> int:
        """Compare what was loaded before a step, too.

        Args:
            step: the step's number; `checksum_code` comes first, where its state is checked.
            loaded: the checksums of what this rank has loaded.

        Returns:
            the code of all; 0 where replicas aren't checked.
        """
        if not self.enabled:
            return 0
        self._sums[step] = sums = {**self._sums.get(step, {}), **loaded}
        return code_of(sums)

    def require_equal_replicas(self, summary: StepSummary, *, stepped: int) -> None:
        """Stop the run if the ranks differ by a summary; by all ranks at the same boundary.

        Args:
            stepped: whether its step ended by `optimizer.step()` on this rank; of several
                optimizers, a bit each.

        Raises:
            ConfigError: only some ranks have ended the step by `optimizer.step()`.
            ReplicasDiffer: the states before the step differ between ranks.
            CommError: a peer was lost, or silent.
        """
        if summary.check_interval:
            self._interval = summary.check_interval
            self._schedule()
        if not summary.same_outcome:
            self._refuse_outcome(summary.step, stepped)
        sums = self._sums.pop(summary.step, {})
        if not summary.same_state:
            self._refuse(summary.step, sums)
        self._equal = summary.step if summary.checked else self._equal

    def compare(self, step: int, state: Parts | ChecksumParts | None) -> None:
        """Compare the state before a step at once; collective.

        Args:
            state: as in `checksum_code`; None on all ranks: there is nothing to compare.

        Raises:
            ReplicasDiffer: it differs between ranks.
        """
        with self._run.timeline.span("check"), torch.no_grad():
            sums = _checksums(state) if state is not None and self.enabled else {}
            code = code_of(sums)
        codes = torch.tensor([code, code**2], dtype=torch.float64)
        communicator = self._run.context.group("data", "steps")
        code_sum, squares = total(communicator, codes, "the snapshot of all ranks").tolist()
        if not all_equal(code_sum, squares, communicator.world_size):
            self._refuse(step, sums)
        self._equal = step if sums else self._equal

    def _schedule(self) -> None:
        """Let the next check be due: at first after 1, 3, 9, … steps, to find bugs soon."""
        self.due = self._last + min(self._interval, max(1, 2 * (self._last - self._first)))

    def _refuse_outcome(self, step: int, stepped: int) -> None:
        """Refuse a step that only some ranks have ended by `optimizer.step()`; collective."""
        communicator = self._run.context.group("all", "steps")
        what = "the comparison of the ranks' steps"
        bits = gather_counts(communicator, int(stepped), what)
        which = next((i for i in range(20) if len({one >> i & 1 for one in bits}) > 1), 0)
        outcomes = [one >> which & 1 for one in bits]
        called = [rank for rank, one in enumerate(outcomes) if one]
        missing = [rank for rank, one in enumerate(outcomes) if not one]
        raise ConfigError(
            f"in step {step} optimizer.step() was called on {name_ranks(called)}, but not on "
            f"{name_ranks(missing)}: call it on all ranks or on none. To skip a batch, decide on "
            "all ranks alike, by the gradients after backward, say, which are the same on all; a "
            "rank that has no samples passes samples=0 to world.step(), and calls optimizer.step() "
            "too."
        )

    def _refuse(self, step: int, sums: Checksums) -> None:
        """Stop the run whose replicas differ before a step; collective."""
        data = json.dumps(sums).encode()
        what = "the comparison of the replicas"
        communicator = self._run.context.group("data", "steps")
        texts = gather_bytes(communicator, data, what)
        if len({*texts}) == 1:  # those of another stage differ, which says more
            raise ReplicasDiffer(
                f"the replicas of another part of the model differ after {many(step, 'step')}: see "
                "the messages of the other ranks."
            )
        raise replicas_differ(step, [json.loads(text) for text in texts], self._equal)


def replicas_differ(
    step: int, of_ranks: Sequence[Checksums], equal: int | None = None
) -> ReplicasDiffer:
    """Return the error for replicas that differ.

    Args:
        step: the number of completed steps.
        of_ranks: each rank's checksums.
        equal: the number of completed steps in the last comparison in which all were equal.
    """
    since = "" if equal is None else f"; in the last comparison, after {many(equal, 'step')}, "
    since += "they were equal" if since else ""
    return ReplicasDiffer(
        f"the replicas differ after {many(step, 'step')}: {difference(of_ranks)}{since}. Usual "
        "causes: code that changes or loads the model, the optimizer or a learning rate on some "
        "ranks only, or from one rank's own loss; a parameter without gradient that the model "
        "computes from one rank's samples (make it a buffer, which is rank 0's on all ranks); a "
        'buffer that a script computes from them (with buffers="local", buffers of the model '
        "aren't compared); faulty memory."
    )


def _checksums(state: Parts | ChecksumParts) -> Checksums:
    return state.result() if isinstance(state, ChecksumParts) else checksums_of(state)
