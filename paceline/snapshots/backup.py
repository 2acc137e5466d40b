"""Backups of snapshots: the own part goes to the backup holder, and others' copies are held here.

    main thread      hold ──▶ queue                    acknowledges?  ── yes ──▶ step summary
    backup thread         pack, frames.send                 ▲
    line's thread      receive ─ record ─▶ confirmation     confirm

A snapshot is acknowledged once the holder has confirmed the own part, unless the machine has
promised to end the generation. What is held is recorded before it is confirmed or acknowledged, and
a smaller list before anything is dropped: a vote that begins at any moment finds what it lists.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from queue import SimpleQueue
from typing import Any, NamedTuple

from paceline.cluster.membership.protocol import Membership
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.cluster.membership.voting.messages import Held
from paceline.errors import CommError, CommTimeout, ConfigError
from paceline.snapshots.own_part import OwnPart

Bytes = bytes | bytearray | memoryview
PartName = tuple[SnapshotName, str]  # with the owner's id

_END_LIMIT = 5.0  # seconds that the end waits for a part that is being sent
_BACKUP = "backup"  # frame of a part for its holder
_CONFIRMED = "confirmed"  # and of the holder's answer
_DURABLE = 2  # checkpoints that are recorded: the older one where the newer turns out to be void
_ENDS = "The present generation of the world ends, because a peer was lost."


class _Own(NamedTuple):
    """Held snapshot: this member's id, the ids of all owners, its number of completed steps.

    That is smaller than the step in its name where a step trains several batches. Where the
    snapshot is complete, this member needs no other one's part.
    """

    owner: str
    whole: frozenset[str]
    completed: int
    complete: bool


class SnapshotBackup:
    """Backups of one member: its parts on the backup holders, and the copies that it holds.

    A part that can't be sent is dropped: its snapshot then isn't acknowledged.

    Args:
        membership: carries parts to the holders, and records what this member holds.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._frames = membership.frames
        self._durable: tuple[Held, ...] = ()
        self._changed = threading.Condition()  # guards all that follows
        self._own: dict[SnapshotName, _Own] = {}
        self._copies: dict[PartName, Bytes] = {}  # of others' parts, the oldest first
        self._confirmed: set[SnapshotName] = set()
        self._acknowledged: set[SnapshotName] = set()
        self._prefix = ""  # of the names whose copies are accepted; "" between generations
        self._interrupted = False
        self._failure: ConfigError | None = None
        self._queue: SimpleQueue[tuple[str, SnapshotName, str, OwnPart] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._frames.handle(_BACKUP, self)
        self._frames.handle(_CONFIRMED, self)

    def begin_generation(self, prefix: str) -> None:
        """Accept the copies of a generation's snapshots, before its ranks connect.

        Args:
            prefix: prefix of the snapshots' names: the generation's `key_prefix`.
        """
        with self._changed:
            self._prefix = prefix
            self._interrupted = False
            self._record()

    def hold(
        self,
        name: SnapshotName,
        part: OwnPart,
        *,
        owner: str,
        holder: str | None,
        whole: Iterable[str],
        completed: int,
        complete: bool = False,
    ) -> None:
        """Record a snapshot that is held, and send the own part in the background.

        Args:
            part: the own part; its memory stays as it is until the part is confirmed.
            owner: this member's id.
            holder: the backup holder's id; None: there is no other member, and nothing is sent.
            whole: ids of all members whose parts make up the snapshot.
            completed: the number of completed steps in it.
            complete: whether this member needs no other one's part, as after `complete`.
        """
        with self._changed:
            self._own[name] = _Own(owner, frozenset(whole), completed, complete)
            self._record()
            if holder is None:
                self._confirmed.add(name)
                return
        if self._thread is None:
            self._thread = threading.Thread(target=self._send, name="paceline-backup", daemon=True)
            self._thread.start()
        self._queue.put((holder, name, owner, part))

    def complete(self, name: SnapshotName) -> None:
        """Note that this member needs no other one's part of a snapshot that was given to `hold`.

        No rank has state of its own, and the sums of all ranks' values are known here.
        """
        with self._changed:
            self._own[name] = self._own[name]._replace(complete=True)
            self._record()

    def holds(self, name: SnapshotName) -> bool:
        """Return whether a snapshot was given to `hold`, and wasn't dropped since."""
        with self._changed:
            return name in self._own

    def acknowledges(self, name: SnapshotName) -> bool:
        """Return whether this rank acknowledges a snapshot: it is held, and its part confirmed.

        Raises:
            ConfigError: the own part has values of which no copy can be made.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            ready = name in self._own and name in self._confirmed
            if ready and name not in self._acknowledged and self._record():
                self._acknowledged.add(name)
            return name in self._acknowledged

    def wait(self, name: SnapshotName, limit: float) -> None:
        """Wait until this rank acknowledges a snapshot.

        Raises:
            ConfigError: as `acknowledges`.
            CommTimeout: the backup holder didn't confirm its copy within `limit` seconds.
            CommError: the generation ends.
        """
        with self._changed:
            ended = self._changed.wait_for(
                lambda: self._interrupted or self._failure or name in self._confirmed, limit
            )
            if not ended:
                raise CommTimeout(
                    f"The backup holder didn't confirm its copy of the snapshot before step "
                    f"{name.step} within {limit:g} s."
                )
        if not self.acknowledges(name):
            raise CommError(_ENDS)

    def commit(self, name: SnapshotName, retained: Collection[SnapshotName]) -> None:
        """Drop the copies that a committed snapshot supersedes; the caller then drops snapshots.

        Args:
            name: of the committed snapshot.
            retained: the snapshots that are held here from now on.

        Raises:
            CommError: the machine has promised to end the generation: nothing is dropped.
        """
        with self._changed:
            dropped = superseded(self._copies, name, self._prefix)
            own = {each: parts for each, parts in self._own.items() if each in retained}
            if not self._acknowledge(own, without=dropped):
                raise CommError(_ENDS)
            self._own = own
            for each in dropped:
                del self._copies[each]
            self._forget_others()

    def leave_generation(self, retained: Collection[SnapshotName]) -> None:
        """Drop all but the snapshots that are held here from now on; accept no copies."""
        with self._changed:
            self._prefix = ""
            self._own = {name: parts for name, parts in self._own.items() if name in retained}
            self._copies = {one: copy for one, copy in self._copies.items() if one[0] in self._own}
            self._forget_others()

    def add_durable(self, held: Held) -> None:
        """Record a checkpoint that this member can read, too; from any thread."""
        with self._changed:
            self._durable = (*self._durable, held)[-_DURABLE:]
            self._record()

    def discard(self) -> None:
        """Drop everything: no snapshots are taken any more."""
        with self._changed:
            self._own = {}
            self._copies = {}
            self._forget_others()
            self._record()

    def parts(self, name: SnapshotName, lost: Iterable[str]) -> list[OwnPart]:
        """Return the copies that are held here of lost members' parts of a snapshot.

        Raises:
            CommError: a copy can't be read.
        """
        with self._changed:
            copies = [self._copies.get((name, owner)) for owner in lost]
        return [OwnPart.unpack(copy) for copy in copies if copy is not None]

    def receive(
        self, peer: str, kind: str, body: Mapping[str, Any], bulk: bytes | bytearray
    ) -> None:
        """Handle a part of another member, or its confirmation of this one's: as `FrameHandler`."""
        name = SnapshotName(body["token"], body["step"])
        if kind == _CONFIRMED:
            self._note_confirmed(name)
        elif self._hold_copy(name, body["owner"], bulk):
            confirmed: dict[str, Any] = {"token": name.token, "step": name.step}
            self._frames.send(peer, _CONFIRMED, confirmed)

    def interrupt(self) -> None:
        """End a wait for a confirmation, because the generation ends; from any thread."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits, and the thread: once it has sent what it is sending, or after a limit."""
        self.interrupt()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_END_LIMIT)
            self._thread = None

    def _send(self) -> None:
        while (task := self._queue.get()) is not None:
            holder, name, owner, part = task
            try:
                if self._sends(name):
                    body: dict[str, Any] = {"token": name.token, "step": name.step, "owner": owner}
                    self._frames.send(holder, _BACKUP, body, part.pack())
            except ConfigError as error:
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
            del task, part  # the snapshot's memory, while this thread waits

    def _hold_copy(self, name: SnapshotName, owner: str, data: Bytes) -> bool:
        """Hold a copy of another member's part; return whether it is held.

        Args:
            owner: the other member's id.
            data: the part, which stays as it is.
        """
        with self._changed:
            if not is_of(self._prefix, name):
                return False
            self._copies[name, owner] = data
            if self._record():
                return True
            del self._copies[name, owner]
            return False

    def _note_confirmed(self, name: SnapshotName) -> None:
        """Note that the holder has this member's part."""
        with self._changed:
            if name in self._own:
                self._confirmed.add(name)
                self._changed.notify_all()

    def _sends(self, name: SnapshotName) -> bool:
        """Return whether a part is still to be sent: its generation is the present one."""
        with self._changed:
            return name in self._own and is_of(self._prefix, name)

    def _record(self) -> bool:
        """Record what is held, and return whether it was recorded; the lock is held."""
        return self._acknowledge(self._own)

    def _acknowledge(
        self, own: Mapping[SnapshotName, _Own], without: Collection[PartName] = ()
    ) -> bool:
        """Replace what is recorded for this member, unless its machine has promised.

        Args:
            own: the snapshots that are held here.
            without: copies that are about to be dropped.

        Returns:
            False where it has promised to end the generation: nothing was changed, and the caller
            neither acknowledges nor drops anything.
        """
        remaining = self._copies.keys() - set(without)
        records = []
        for name, (owner, whole, completed, complete) in own.items():
            copies = {other for each, other in remaining if each == name}
            held = Held(
                generation=name.token.split("/")[1],
                token=f"{name.token}:{name.step}",
                step=completed,
                parts=tuple(sorted({owner, *copies})),
                members=len(whole),
                complete=complete,
            )
            records.append(held)
        return self._membership.acknowledge((*records, *self._durable))

    def _forget_others(self) -> None:
        """Forget the confirmations of snapshots that aren't held any more."""
        self._confirmed &= self._own.keys()
        self._acknowledged &= self._own.keys()


def superseded(copies: Iterable[PartName], name: SnapshotName, newer: str) -> list[PartName]:
    """List the copies that a committed snapshot supersedes.

    Those of its owners are superseded that were received before its own part; of other owners,
    those of other generations.

    Args:
        copies: of parts, in the order in which they were received.
        name: of the committed snapshot.
        newer: prefix of the names of the present generation's snapshots.
    """
    order = list(copies)
    found = []
    for number, (each, owner) in enumerate(order):
        if (name, owner) in order:
            older = number < order.index((name, owner))
        else:
            older = each != name and not is_of(newer, each)
        if older:
            found.append((each, owner))
    return found


def is_of(prefix: str, name: SnapshotName) -> bool:
    """Return whether a snapshot was taken in the generation with this key prefix."""
    return bool(prefix) and f"{name.token}/".startswith(f"{prefix}/")
