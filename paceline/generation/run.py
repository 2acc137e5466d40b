"""Run: has the present generation's context for objects that outlive a generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

from torch._C._distributed_c10d import Store

from paceline.cluster.membership.generation import Group
from paceline.cluster.membership.lineage import Lineage
from paceline.generation.context import GenerationContext
from paceline.recorder import NullRecorder, Recorder
from paceline.timeline.step_trace import Trace


@dataclass(kw_only=True)
class Run:
    """Run: the present generation's context, and the recorders of the run.

    Objects that outlive a generation keep the run, and ask its context at each use. They keep no
    rank, world size or communicator.

    As a context manager, it closes the present context with the block, or aborts it.

    Attributes:
        context: the present generation's context.
        make_context: makes the context of a further generation; collective among its ranks.
        record_number: called with the group of a further generation, before its ranks connect.
        recorder: receives spans, counts and events.
        trace: recorder of the trace; None if the run is not traced.
        store: the store of the run's start; None: what needs it doesn't work.
        require_member: raises CommError where this process may be outside the world, so that it may
            record no results.
        report_progress: called with the step in which this process is, after each step.
        may_write: returns whether this process is in the world, so that it may write files, from
            any thread; it waits until that is known.
        lease_lasts: returns whether it is known now to be in the world, from any thread.
    """

    context: GenerationContext
    make_context: Callable[[Group], GenerationContext] | None = None
    record_number: Callable[[Group], None] = lambda group: None
    recorder: Recorder = field(default_factory=NullRecorder)
    trace: Trace | None = None
    store: Store | None = None
    require_member: Callable[[], None] = lambda: None
    report_progress: Callable[[int], None] | None = None
    may_write: Callable[[], bool] = lambda: True
    lease_lasts: Callable[[], bool] = lambda: True
    _opened: list[tuple[str, str]] = field(default_factory=list)
    _entered: list[Callable[[], None]] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.context.__exit__(kind)

    def open(self, axis: str, purpose: str) -> None:
        """Open a group in the present context and, in the order of these calls, in each later one.

        All ranks call it. A group that is open stays.

        Args:
            axis: as of `GenerationContext.group`.
            purpose: likewise.

        Raises:
            CommError: a rank didn't come in time.
        """
        self.context.group(axis, purpose)
        if (axis, purpose) not in self._opened:
            self._opened.append((axis, purpose))

    def when_entered(self, call: Callable[[], None]) -> None:
        """Let `enter` call a function at its end, once all ranks of the generation are connected.

        What only rank 0 does is handed over there: the function looks at `leads`.
        """
        self._entered.append(call)

    def start_at(self, number: int, *, ancestors: Lineage = (), start: int = 0) -> None:
        """Place the first generation of a start in the run, as its ranks learn when connected.

        Args:
            number: its number.
            ancestors: the generations from which it descends, the oldest first.
            start: the number of completed steps from which it continues.
        """
        present = self.context.world.generation
        self.context.begin(replace(present, number=number, ancestors=ancestors, start=start))

    def enter(self, group: Group, prepare: Callable[[], None] | None = None) -> None:
        """Abort the present context and make the next generation's; collective among its ranks.

        Args:
            group: all ranks of the next generation, as this one sees them.
            prepare: called once the ranks are connected, before the generation is recorded.

        Raises:
            CommError: a rank didn't come in time.
        """
        assert self.make_context is not None
        present = self.context.world.generation
        following = group.generation
        assert following.number > present.number
        assert following.token != present.token
        self.context.abort()
        if prepare is None:
            self.record_number(group)
        self.context = self.make_context(group)
        if prepare is not None:
            prepare()
            self.record_number(group)
        for axis, purpose in self._opened:
            self.context.group(axis, purpose)
        for call in self._entered:
            call()

    @property
    def leads(self) -> bool:
        """Whether this process is the present generation's leader, its rank 0."""
        return self.context.world.rank == 0

    def rank_and_size(self) -> tuple[int, int]:
        """Return this process's present rank among those that divide samples, and their number."""
        data = self.context.along("data")
        return data.rank, data.size
