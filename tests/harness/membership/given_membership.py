"""Twins of what a run asks about its generations: answers that a test gives."""

from __future__ import annotations

from collections.abc import Callable

from torch._C._distributed_c10d import Store

from paceline.cluster.membership.generation import Group
from paceline.cluster.membership.protocol import Membership, Successor
from paceline.cluster.membership.static import StaticMembership
from paceline.errors import CommError
from paceline.generation.builder import Builder
from paceline.generation.context import GenerationContext


class GivenMembership(StaticMembership):
    """Membership whose answers are a test's; the others are those of a static one.

    Args:
        store: the store of the start.
        next_generation: decides on the next generation; without it, no loss is survived.
        require_member: raises an error where this process is outside the world.
        may_write: returns whether it may write, once it is known.
        lease_lasts: returns whether it is known now that it may.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        next_generation: Callable[[CommError], Successor] | None = None,
        require_member: Callable[[], None] = lambda: None,
        may_write: Callable[[], bool] = lambda: True,
        lease_lasts: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(store)
        self.survives = next_generation is not None
        self._next_generation = next_generation
        self._require_member = require_member
        self._may_write, self._lease_lasts = may_write, lease_lasts

    def next_generation(self, lost: CommError) -> Successor:
        if self._next_generation is None:
            raise lost
        return self._next_generation(lost)

    def may_write(self, *, wait: bool) -> bool:
        return self._may_write() if wait else self._lease_lasts()

    def require_member(self) -> None:
        self._require_member()


class GivenConnector:
    """Connector whose contexts a test makes.

    Args:
        make_context: makes that of a further generation.
    """

    def __init__(self, make_context: Callable[[Group], GenerationContext]) -> None:
        self._make_context = make_context

    def connect(
        self, group: Group, membership: Membership, builder: Builder, *, first: bool = False
    ) -> GenerationContext:
        return self._make_context(group)
