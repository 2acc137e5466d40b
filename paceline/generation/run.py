"""Run: has the present generation's context for objects that outlive a generation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from torch._C._distributed_c10d import Store

from paceline.cluster.membership.generation import Group
from paceline.cluster.membership.lineage import Lineage
from paceline.cluster.membership.protocol import Membership
from paceline.cluster.membership.static import StaticMembership
from paceline.errors import Message
from paceline.generation.builder import Builder
from paceline.generation.connector import Connector
from paceline.generation.context import GenerationContext
from paceline.generation.notes import Notes
from paceline.recorder import NullRecorder, Recorder
from paceline.timeline.timeline import Timeline


class Leadership(Protocol):
    """Protocol of what says whether this process is the present generation's leader."""

    @property
    def leads(self) -> bool:
        """Whether it is."""


@dataclass(kw_only=True)
class Run:
    """Run: the present generation's context, and what outlives it.

    Objects that outlive a generation keep the run, and ask its context at each use. They keep no
    rank, world size or communicator.

    As a context manager, it closes the present context with the block, or aborts it.

    Attributes:
        context: the present generation's context.
        connector: connects the ranks of a further generation; None: there is none.
        membership: says which processes are in the world.
        builder: says what each generation is made of.
        recorder: receives events.
        notes: phrases and shows what the user is to know.
        store: the store of the run's start; None: what needs it doesn't work.
    """

    context: GenerationContext
    connector: Connector | None = None
    membership: Membership = field(default_factory=StaticMembership)
    builder: Builder = field(default_factory=Builder)
    recorder: Recorder = field(default_factory=NullRecorder)
    notes: Notes = field(default_factory=Notes)
    store: Store | None = None

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
        self.builder.add(axis, purpose)

    def start_at(self, number: int, *, ancestors: Lineage = (), start: int = 0) -> None:
        """Place the first generation of a start in the run, as its ranks learn when connected.

        Args:
            ancestors: the generations from which it descends, the oldest first.
            start: the number of completed steps from which it continues.
        """
        present = self.context.world.generation
        self.context.begin(replace(present, number=number, ancestors=ancestors, start=start))

    def enter(self, group: Group) -> None:
        """Abort the present context and make the next generation's; collective among its ranks.

        Args:
            group: all ranks of the next generation, as this one sees them.
        """
        assert self.connector is not None
        present = self.context.world.generation
        following = group.generation
        assert following.number > present.number
        assert following.token != present.token
        self.context.abort()
        spares = self.context.spares
        self.context = self.connector.connect(group, self.membership, self.builder)
        for axis, purpose in self.builder.purposes():
            self.context.group(axis, purpose)
        self.context.spares = spares

    def note(self, note: str | Message, *, shown: bool = True) -> None:
        """Record a note for the user, and show it if it is `shown`."""
        self.recorder.event("note", text=self.notes.text(note))
        if shown:
            self.notes.show(note)

    @property
    def timeline(self) -> Timeline:
        """This rank's timeline, on which all generations are."""
        return self.context.timeline

    @property
    def leads(self) -> bool:
        """Whether this process is the present generation's leader, its rank 0."""
        return self.context.world.rank == 0

    def rank_and_size(self) -> tuple[int, int]:
        """Return this process's present rank among those that divide samples, and their number."""
        data = self.context.along("data")
        return data.rank, data.size
