"""Observer of all processes at once, which finds what the protocol must not do.

    one successor      a generation has at most one decided successor
    no rollback        a successor doesn't start before a committed snapshot, unless all holders of
                       one of its parts are lost
    usable start       all members hold the start, which is in their lineage, with all its parts
    one history        a member enters descendants of its generation alone
    ledger             each committed step counts once, by the rule for void lines

It repeats the definitions in words of its own: a rule of the product that is broken on purpose
isn't used here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from paceline.cluster.membership.generation import Ancestor, Generation

Acknowledged = dict[str, dict[int, dict[str, frozenset[str]]]]
"""By generation, step and member: the parts that the member has acknowledged."""


Copies = Callable[[str, str, int], Collection[str] | None]
"""Returns the parts of a snapshot (generation, step) in a member's memory; None: it has none."""


class Violation(AssertionError):
    """Error of a schedule that broke the protocol."""


@dataclass(kw_only=True)
class Oracle:
    """Observer of one schedule.

    Attributes:
        first: the first generation.
        copies: looks into the members' memory, that of dead ones too.
        parts: whether a snapshot has a part of each member.
        void_from_start: a fault of the ledger's rule: lines are void from the start step on.
        parent_only: a fault of the ledger's headers: they name the parent alone.
        successors: the decided successor of each generation, by its id.
        acknowledged: what members have acknowledged.
        committed: the committed steps of each generation.
        lines: the steps in the ledger of each generation that has a ledger.
    """

    first: Generation
    copies: Copies
    parts: bool = True
    void_from_start: bool = False
    parent_only: bool = False
    successors: dict[str, Generation] = field(default_factory=dict)
    acknowledged: Acknowledged = field(default_factory=dict)
    committed: dict[str, set[int]] = field(default_factory=dict)
    lines: dict[str, set[int]] = field(default_factory=dict)
    generations: dict[str, Generation] = field(default_factory=dict)
    backups: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._add(self.first)

    @property
    def newest(self) -> Generation:
        """The last generation of the decided chain."""
        generation = self.first
        while (successor := self.successors.get(generation.id)) is not None:
            generation = successor
        return generation

    def decide(self, generation: Generation, value: Generation, durable: Collection[int]) -> None:
        """Observe a decision; `durable`: the steps of the checkpoints that old members can read."""
        known = self.successors.get(generation.id)
        if known is not None:
            if known.id != value.id:
                raise Violation("two successors")
            return
        self.successors[generation.id] = value
        self._add(value)
        self._check_start(generation, value, durable)
        newest = self.newest_committed(generation)
        if newest is not None:
            self._check_rollback(value, *newest)

    def acknowledge(
        self, generation: Generation, step: int, member: str, parts: tuple[str, ...]
    ) -> None:
        """Observe an acknowledgement."""
        steps = self.acknowledged.setdefault(generation.id, {})
        holders = steps.setdefault(step, {})
        holders[member] = frozenset(parts)
        if len(holders) < len(generation.members) or step in self.committed[generation.id]:
            return
        backups = self.backups[generation.id]
        if all(part in holders[backup] for part, backup in backups.items()):
            self.committed[generation.id].add(step)
            value = self.successors.get(generation.id)
            if value is not None and step > value.start:
                self._check_rollback(value, generation, step)

    def enter(self, member: str, before: Generation, after: Generation) -> None:
        """Observe that a member enters a generation."""
        if all(value.id != after.id for value in self.successors.values()):
            raise Violation("a member enters a generation that wasn't decided")
        if before.id not in {each.id for each in after.ancestors}:
            raise Violation("a member enters a generation that doesn't descend from its own")
        if member not in _ids(after):
            raise Violation("a process enters a generation of which it is no member")
        if after.start_token and self.copies(member, after.start_token, after.start) is None:
            raise Violation("a member enters without the start")

    def write_line(self, generation: Generation, step: int) -> None:
        """Observe a line of the ledger."""
        self.lines.setdefault(generation.id, set()).add(step)

    def newest_committed(self, generation: Generation) -> tuple[Generation, int] | None:
        """Return the newest committed snapshot in the history of a generation."""
        bound: float = float("inf")
        for each in reversed(generation.lineage):
            steps = [step for step in self.committed.get(each.id, ()) if step <= bound]
            if steps:
                return self.generations[each.id], max(steps)
            bound = min(bound, each.start)
        return None

    def check_ledger(self) -> None:
        """Check that each step up to the newest committed one counts once."""
        newest = self.newest_committed(self.newest)
        for step in range(self.first.start + 1, newest[1] + 1 if newest else 0):
            valid = [
                g for g, steps in self.lines.items() if step in steps and not self._void(g, step)
            ]
            if len(valid) != 1:
                raise Violation(f"a step counts {len(valid)} times")

    def _add(self, generation: Generation) -> None:
        self.generations[generation.id] = generation
        self.committed[generation.id] = set()
        self.backups[generation.id] = backup_holders(generation) if self.parts else {}

    def _check_start(
        self, generation: Generation, value: Generation, durable: Collection[int]
    ) -> None:
        if not value.start_token:
            if value.start not in durable and value.start != self.first.start:
                raise Violation("no member can read the checkpoint of the start")
            return
        if not _in_lineage(value.start_token, value.start, generation.lineage):
            raise Violation("the start is outside the lineage")
        copies = [
            self.copies(member, value.start_token, value.start)
            for member in _ids(generation) & _ids(value)
        ]
        parts = set[str]()
        for copy in copies:
            if copy is None:
                raise Violation("a member doesn't hold the start")
            parts.update(copy)
        if self.parts and parts != _ids(self.generations[value.start_token]):
            raise Violation("a part of the start has no holder")

    def _check_rollback(self, value: Generation, generation: Generation, step: int) -> None:
        if value.start < step and self._has_all_parts(generation.id, step, _ids(value)):
            raise Violation("a committed snapshot is rolled back")

    def _has_all_parts(self, generation: str, step: int, members: set[str]) -> bool:
        holders = self.acknowledged[generation][step]
        if not self.parts:
            return not members.isdisjoint(holders)
        parts = frozenset[str]().union(*(holders.get(member, ()) for member in members))
        return parts == _ids(self.generations[generation])

    def _void(self, generation: str, step: int) -> bool:
        """Return whether a line is void by the headers of the ledgers that were written."""
        for id in self.lines:
            lineage = self.generations[id].lineage
            if self.parent_only:
                lineage = lineage[-2:]
            ids = [each.id for each in lineage]
            if generation in ids:
                later = lineage[ids.index(generation) + 1 :]
                if any(each.start < step for each in later):
                    return True
                if self.void_from_start and any(each.start == step for each in later):
                    return True
        return False


def backup_holders(generation: Generation) -> dict[str, str]:
    """Return each member's backup holder: the next rank, of another machine where there is one."""
    members = generation.members
    holders = {}
    for rank, member in enumerate(members):
        others = members[rank + 1 :] + members[:rank]
        far = [other for other in others if other.machine != member.machine]
        if others:
            holders[member.id] = (far or others)[0].id
    return holders


def has_quorum(generation: Generation, machines: Iterable[int], *, witness: bool) -> bool:
    """Return whether machines, and perhaps the witness, decide."""
    all_machines = set(generation.machines)
    votes, even = len(all_machines & set(machines)), len(all_machines) % 2 == 0
    if even and generation.witness:
        return 2 * (votes + witness) > len(all_machines) + 1
    casting = even and 2 * votes == len(all_machines) and min(all_machines) in machines
    return 2 * votes > len(all_machines) or casting


def _in_lineage(id: str, step: int, lineage: tuple[Ancestor, ...]) -> bool:
    ids = [each.id for each in lineage]
    return id in ids and all(step <= each.start for each in lineage[ids.index(id) + 1 :])


def _ids(generation: Generation) -> set[str]:
    return {member.id for member in generation.members}
