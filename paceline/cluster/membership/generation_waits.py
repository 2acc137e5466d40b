"""What the training thread and the control line's thread share: waits, which end in a decision.

training thread                             control line's thread
waits for peers, or in the store      ◀──   interrupt: the generation can't continue
next: waits for the decision          ◀──   decide: the next generation, or fail: none
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from paceline.cluster.membership.control_store import ControlStore, ControlStores
from paceline.cluster.membership.generation import Generation, Member
from paceline.cluster.membership.protocol import InterruptibleGeneration
from paceline.errors import CommError, PeerLost


class OutsideWorld(PeerLost):
    """Error of a member that is in no further generation.

    Attributes:
        expelled: whether the others continue without it, so that it must write nothing. Otherwise
            there is no quorum, or no state to continue from, or this member is on the losing side
            of a cut link: it may write its newest state once.
        others_continue: whether the others continue, so that the same command doesn't resume the
            run here.
    """

    remedy = "Check the connections between the machines, and start the same command again."
    expelled = False
    others_continue = False


@dataclass(frozen=True, kw_only=True)
class Change:
    """Change of the generation, with what it took.

    Attributes:
        generation: the next generation.
        lost: the members that aren't in it.
        left: whether one of them ended well, while the others still needed it.
        silent: whether this member had no heartbeat of all members of the next generation.
        causes: why each of them was lost, a sentence without its stop; "" where this member has no
            evidence of it.
        detected_at: when the first suspicion or report came, by the monotonic clock.
        decided_at: when the outcome was known here.
        mates: why members were lost that had a replica of the model with this one; () if none was.
    """

    generation: Generation
    lost: tuple[Member, ...]
    left: bool
    silent: bool
    causes: tuple[str, ...]
    detected_at: float
    decided_at: float
    mates: tuple[str, ...] = ()


class GenerationWaits:
    """Waits of the training thread, by generation; used from any thread.

    Args:
        stores: the open stores of the control line.
    """

    def __init__(self, stores: ControlStores) -> None:
        self._stores = stores
        self._changed = threading.Condition()  # guards all that follows
        self._changes: dict[str, Change] = {}  # by the id of the generation that ended
        self._failure: CommError | None = None
        self._waits: dict[str, InterruptibleGeneration] = {}
        self._interrupted: set[str] = set()
        self._store: tuple[str, ControlStore] | None = None

    def attach(self, generation: Generation, waits: InterruptibleGeneration) -> None:
        """Interrupt the waits of a generation once it can't continue; at once, if it can't now."""
        with self._changed:
            # The generation before has no waits left: its
            # context is aborted before another one is made.
            self._waits = {generation.id: waits}
            known = generation.id in self._interrupted
        # Not under the lock: what is interrupted has locks of its own.
        if known:
            waits.interrupt()

    def store_of(self, generation: Generation, open: Callable[[], ControlStore]) -> Store:
        """Return a generation's store, which serves until the generation ends."""
        with self._changed:
            if self._store is None or self._store[0] != generation.id:
                store = open()
                self._remove_store()
                self._store = generation.id, store
                self._stores.add(store)
                # The generation may have ended before its store was opened: no leader would answer.
                if generation.id in self._interrupted:
                    store.close()
            return self._store[1]

    def interrupt(self, generation: Generation, *, broken: bool = False) -> None:
        """End the waits of a generation, once.

        Args:
            broken: this process has no further generation. The waits of an earlier one end, too,
                if it hasn't left that yet.
        """
        with self._changed:
            if generation.id in self._interrupted and not broken:
                return
            self._interrupted.add(generation.id)
            ending = [one for id, one in self._waits.items() if broken or id == generation.id]
            store = self._store
        for waits in ending:
            waits.interrupt(broken=broken)
        if store is not None and store[0] == generation.id:
            store[1].close()

    def has_ended(self, generation: Generation) -> bool:
        """Return whether a generation can't continue, or no decision is possible any more."""
        with self._changed:
            return generation.id in self._interrupted or self._failure is not None

    def decide(self, ended: Generation, change: Change) -> None:
        """End the wait for the generation after `ended`."""
        with self._changed:
            self._changes[ended.id] = change
            self._changed.notify_all()

    def fail(self, error: CommError) -> None:
        """End the wait for the next generation, whichever it is, with an error."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def next(self, present: Generation, limit: float) -> Change | None:
        """Wait for the change that ends a generation; return None after `limit` seconds.

        Raises:
            CommError: no decision is possible.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or present.id in self._changes, limit
            )
            if self._failure is not None:
                raise self._failure
            return self._changes.pop(present.id, None)

    def close(self) -> None:
        """Close the store."""
        with self._changed:
            self._remove_store()

    def _remove_store(self) -> None:
        if self._store is not None:
            self._stores.remove(self._store[1])
            self._store = None


def left_out(change: Change) -> OutsideWorld:
    """Return the error of a member that isn't in the next generation."""
    if change.mates:
        reasons = "; ".join(reason.rstrip(".") for reason in change.mates)
        error = OutsideWorld(
            f"{reasons}. This process had a replica of the model with it, and leaves the run; the "
            "other replicas continue."
        )
        error.remedy = "The next start of the same command trains with all replicas."
        error.expelled = error.others_continue = True
        return error
    if change.silent:
        numbers = sorted({member.machine for member in change.generation.members})
        which = f"machine{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        error = OutsideWorld(f"This process has lost {which}, where the run continues without it.")
        error.remedy = (
            "Check the connections between the machines; the run's end is reported there."
        )
        error.others_continue = True
        return error
    error = OutsideWorld(
        "This process was expelled from the run, because the others had no sign of life from it; "
        "they continue without it."
    )
    error.remedy = "Check whether it was stopped, or its machine overloaded."
    error.expelled = error.others_continue = True
    return error


def without_replica(reasons: Sequence[str]) -> OutsideWorld:
    """Return the error of all members where no replica of the model is whole any more."""
    causes = "; ".join(reason.rstrip(".") for reason in reasons) or "A process was lost"
    error = OutsideWorld(f"{causes}. With that, no replica of the model is whole any more.")
    error.remedy = "Start the same command again: it resumes the run from its newest checkpoint."
    return error


def without_quorum(
    member: Member, reached: str, reasons: Sequence[str], *, was_stopped: bool
) -> OutsideWorld:
    """Return the error of a member that reaches too few machines for a decision.

    Args:
        reached: how many machines it reaches, and of how many.
        reasons: why it suspects others, each a sentence without its stop.
        was_stopped: whether it was stopped for so long that the others may have expelled it.
    """
    error = OutsideWorld(
        f"The run can't continue on machine {member.machine} ({member.host}): it reaches "
        f"{reached}, which doesn't suffice to decide "
        f"({'; '.join(reasons) or 'no decision was made'})."
        + (" It was stopped, and the others may continue without it." if was_stopped else "")
    )
    error.remedy = (
        "Check the other machines and the connections to them; where the run has ended on all, "
        "start the same command again."
    )
    error.expelled = was_stopped
    return error
