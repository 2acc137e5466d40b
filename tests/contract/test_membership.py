"""Members decide the next generation over real connections; each is an object of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from paceline.cluster.membership import voting_member
from paceline.cluster.membership.acceptor_record import AcceptorRecord
from paceline.cluster.membership.control_line.frame_kinds import VOTE
from paceline.cluster.membership.elastic import ElasticMembership
from paceline.cluster.membership.evidence import CLOSED_GRACE_S, EvidenceOptions
from paceline.cluster.membership.generation import Generation, Group
from paceline.cluster.membership.generation_waits import Change, OutsideWorld
from paceline.cluster.membership.machine_acceptor import MachineAcceptor
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.cluster.membership.voting.messages import Held
from paceline.cluster.membership.voting_member import VotingMember
from paceline.cluster.membership.witness import Witness
from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.stores.folder_store import FolderStore
from paceline.errors import CheckpointError, CommError, CommTimeout, PeerLost
from paceline.replica.live_hooks import patch
from paceline.snapshots.backup import SnapshotBackup
from paceline.snapshots.durable_files import DurableFiles
from paceline.state.checkpoint_writer import Checkpoint
from tests.harness.equivalence.steps_by_hand import active_step
from tests.harness.processes.run_folders import wait_until
from tests.harness.processes.worlds import world_of

LIMIT = 20.0
OPTIONS = EvidenceOptions(peer_timeout=10.0, timeout=3.0)  # no thread is late by so much
HASTY = replace(OPTIONS, peer_timeout=3.0)  # where no other member is to be suspected
LOST = CommError("a peer was lost.")


class Interrupted(threading.Event):
    """Waits of a generation that are over once they are interrupted.

    Attributes:
        broken: the generation is the process's last one.
    """

    broken = False

    def interrupt(self, *, broken: bool = False) -> None:
        self.broken |= broken
        self.set()


class Members:
    """Members of one world, by rank."""

    def __init__(
        self,
        machines: tuple[int, ...],
        witness: Callable[[], Witness] | None = None,
        nonce: str = "",
        options: EvidenceOptions = OPTIONS,
        record_limit: float = LIMIT,
    ) -> None:
        self._stack = ExitStack()
        generation = world_of(machines, 0).generation
        self.generation = Generation(
            number=0, token="first", members=generation.members, witness=nonce
        )
        self.interrupted = [Interrupted() for _ in generation.members]
        records: dict[int, AcceptorRecord] = {}
        self.records = records
        self.all: list[VotingMember] = []
        for member in generation.members:
            record = records.get(member.machine)
            if record is None:
                record = AcceptorRecord.make(limit=record_limit)
            else:
                record = AcceptorRecord.open(record.path, limit=record_limit)
            records.setdefault(member.machine, record)
            self.all.append(
                VotingMember(
                    self.generation,
                    member,
                    secret=b"secret",
                    acceptor=MachineAcceptor(record, member.machine),
                    witness=None if witness is None else witness(),
                    options=options,
                )
            )
        for one in self.all:
            for member, other in zip(generation.members, self.all, strict=True):
                one.line.expect(member.id, "127.0.0.1", other.line.port)
        for rank, one in enumerate(self.all):
            ids = [member.id for member in generation.members]
            assert not one.line.wait_connected(ids, LIMIT)
            one.begin(self.generation)
            one.waits.attach(self.generation, self.interrupted[rank])

    def enter_step(self, number: int, *ranks: int) -> None:
        """Let these members be in a step to their end; the others work outside one."""
        for rank in ranks:
            self._stack.enter_context(active_step(self.all[rank].activities, number))

    def kill(self, *ranks: int) -> None:
        """End members' connections, as the kernel does for processes that are killed at once."""
        closed = threading.Event()
        for rank, one in enumerate(self.all):
            if rank not in ranks:  # none notices the first end before the last one
                one.line.post(lambda: closed.wait(LIMIT))
        closers = [threading.Thread(target=self.all[rank].line.close) for rank in ranks]
        for rank in ranks:  # nor does one that is ending, which would vote without the first
            patch(self.all[rank], "closed", lambda *_: None)
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(LIMIT)
        closed.set()

    def freeze(self, rank: int) -> None:
        """Let no heartbeat of a member arrive any more."""
        began, frozen = time.monotonic(), self.generation.members[rank].id
        for one in self.all:

            def silence(_: object, peer: str, plain: Callable[[str], float]) -> float:
                return time.monotonic() - began if peer == frozen else plain(peer)

            patch(one.line, "silence", partial(silence, plain=one.line.silence))

    def sent(self, rank: int, message: str, times: int) -> threading.Event:
        """Return what is set once a member has sent messages of a kind in a vote to one other."""
        line, done = self.all[rank].line, threading.Event()
        plain, left = line.send, iter(range(times - 1))

        def send(peer: str, kind: str, body: Mapping[str, Any], bulk: bytes = b"") -> bool:
            if kind == VOTE and body["kind"] == message and next(left, None) is None:
                done.set()
            return plain(peer, kind, body, bulk)

        patch(line, "send", lambda _, *words: send(*words))
        return done

    def silence_after(self, rank: int, message: str) -> threading.Event:
        """Let a member send nothing after its first message of a kind in a vote, to one member."""
        line, ended = self.all[rank].line, threading.Event()
        plain = line.send

        def send(peer: str, kind: str, body: Mapping[str, Any], bulk: bytes = b"") -> bool:
            sent = not ended.is_set() and plain(peer, kind, body, bulk)
            if kind == VOTE and body["kind"] == message:
                ended.set()
            return sent

        patch(line, "send", lambda _, *words: send(*words))
        return ended

    def next(
        self, ranks: tuple[int, ...], present: Generation | None = None, error: CommError = LOST
    ) -> list[Change | CommError]:
        """Let members leave a generation together; return what each gets."""
        found: dict[int, Change | CommError] = {}

        def leave(rank: int) -> None:
            try:
                found[rank] = self.all[rank].next_generation(present or self.generation, error)
            except CommError as refused:
                found[rank] = refused

        threads = [threading.Thread(target=leave, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        return [found[rank] for rank in ranks]

    def close(self) -> None:
        for one in self.all:
            one.close()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Members]]:
    monkeypatch.setattr(voting_member, "_JUDGE_S", 0.1)
    monkeypatch.setattr(voting_member, "_PROGRESS_S", 0.25)
    with ExitStack() as stack:

        def made(*args: Any, **options: Any) -> Members:
            members = Members(*args, **options)
            stack.callback(members.close)
            return members

        yield made


def ids(members: Members, *ranks: int) -> set[str]:
    return {members.generation.members[rank].id for rank in ranks}


def held_by(members: Members, rank: int, step: int) -> Held:
    generation = members.generation
    parts = tuple(member.id for member in generation.members)  # all, as with one worker's own
    assert parts[rank]
    return Held(
        generation=generation.id, token=generation.key_prefix, step=step, parts=parts, members=3
    )


def agreed(found: list[Change | CommError]) -> Generation:
    generations = [one.generation for one in found if isinstance(one, Change)]
    assert len(generations) == len(found), found
    assert all(one == generations[0] for one in generations)
    return generations[0]


@pytest.mark.parametrize("machines", [(1, 1, 1), (2, 1), (3,)])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_others_agree_on_a_generation_without_a_lost_member(
    machines: tuple[int, ...], lost: int, make: Callable[..., Members]
) -> None:
    members = make(machines)
    for rank, one in enumerate(members.all):
        steps = [4, 6] if rank != 1 else [4]
        held = tuple(held_by(members, rank, step) for step in steps)
        assert one.acknowledge(members.generation, held)
    others = tuple({0, 1, 2} - {lost})
    members.kill(lost)
    for rank in others:
        if machines == (2, 1) and lost == 0:
            break  # its record lives on in rank 1
        assert members.interrupted[rank].wait(LIMIT)
    value = agreed(members.next(others))
    assert {member.id for member in value.members} == ids(members, *others)
    assert value.number == 1
    assert value.start == (6 if lost == 1 else 4)
    assert value.ancestors == members.generation.lineage
    held = held_by(members, others[0], 7)
    first = members.all[others[0]]
    assert not first.acknowledge(members.generation, (held,))
    with pytest.raises(PeerLost, match="Generation 0 records nothing more"):
        first.require_member(members.generation)
    first.require_member(value)


def test_a_loss_in_the_recovery_leads_to_the_generation_after_next(
    make: Callable[..., Members],
) -> None:
    members = make((1, 1, 1, 1, 1))
    members.kill(4)
    first = agreed(members.next((0, 1, 2, 3)))
    members.kill(0)
    found = members.next((1, 2, 3), first)
    second = agreed(found)
    for change in found:
        assert isinstance(change, Change)
        assert str(change.causes[0]).startswith(
            "the connections of rank 0 of generation 1 on machine 0 (a) ended "
        )
    assert {member.id for member in second.members} == ids(members, 1, 2, 3)
    assert second.number == 2


@pytest.mark.parametrize("message", ["Prepare", "Accept", "Decided"])
def test_a_proposer_that_is_lost_in_the_vote_is_left_out_too(
    message: str, make: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(voting_member, "_TURN_S", LIMIT)  # no other one proposes before it is lost
    members = make((1, 1, 1, 1, 1))
    ended = members.silence_after(0, message)
    members.kill(4)
    assert ended.wait(LIMIT)
    members.kill(0)
    found = dict(zip((1, 2, 3), members.next((1, 2, 3)), strict=True))
    behind = {  # those that learned of the first vote's outcome, if it came to one
        rank: change
        for rank, change in found.items()
        if isinstance(change, Change) and len(change.generation.members) > 3
    }
    if behind:
        first = agreed(list(behind.values()))
        found |= zip(behind, members.next(tuple(behind), first), strict=True)
    value = agreed(list(found.values()))
    assert {member.id for member in value.members} == ids(members, 1, 2, 3)


def test_a_member_that_has_long_been_silent_is_judged_before_a_vote(
    make: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one, which suspects it already, has interrupted the generation."""
    # Rank 0 alone proposes: rank 1 isn't really frozen here, and would propose itself.
    monkeypatch.setattr(voting_member, "_TURN_S", LIMIT)
    members = make((3,), options=replace(OPTIONS, peer_timeout=4.0))
    members.freeze(1)
    wait_until(lambda: members.all[0]._watch.is_unsure, limit=LIMIT)
    value = agreed(members.next((0, 2)))
    assert {member.id for member in value.members} == ids(members, 0, 2)


def test_a_vote_waits_for_a_machine_whose_record_is_being_changed(
    make: Callable[..., Members],
) -> None:
    """Its holder runs, but doesn't end: a process that is frozen otherwise than by a signal."""
    members = make((1, 1, 1), options=replace(OPTIONS, peer_timeout=LIMIT), record_limit=0.2)
    second_ballot = members.sent(0, "Prepare", 2)
    held, going = threading.Event(), threading.Event()

    def change(text: str) -> tuple[str, None]:
        held.set()
        going.wait(LIMIT)
        return text, None

    other = AcceptorRecord.open(members.records[0].path)
    holder = threading.Thread(target=lambda: other.update(change))
    holder.start()
    assert held.wait(LIMIT)
    members.kill(2)
    assert second_ballot.wait(LIMIT)
    going.set()
    value = agreed(members.next((0, 1)))
    assert {member.id for member in value.members} == ids(members, 0, 1)
    holder.join(LIMIT)
    other.close()


def test_a_world_whose_members_all_live_continues_with_all(make: Callable[..., Members]) -> None:
    """A data connection broke, but no process is lost."""
    members = make((1, 1, 1))
    value = agreed(members.next((0, 1, 2)))
    assert {member.id for member in value.members} == ids(members, 0, 1, 2)


def test_the_casting_machine_of_a_pair_continues_and_the_other_one_stops(
    make: Callable[..., Members],
) -> None:
    members = make((1, 1))
    members.kill(1)
    value = agreed(members.next((0,)))
    assert {member.id for member in value.members} == ids(members, 0)
    other = make((1, 1), options=HASTY)
    other.kill(0)
    (refused,) = other.next((1,))
    assert isinstance(refused, OutsideWorld)
    assert "reaches 1 of 2 machines" in str(refused)
    assert not refused.expelled
    assert not other.all[1].may_write()


def test_the_run_of_a_member_outside_the_world_may_write_nothing(
    make: Callable[..., Members],
) -> None:
    members = make((1, 1), options=HASTY)
    members.kill(0)
    members.next((1,))
    membership = ElasticMembership(members.all[1], members.generation, HashStore())
    assert membership.may_write(wait=False)  # before the first vote nobody is expelled
    membership.begin(members.generation)
    assert not membership.may_write(wait=True)
    assert not membership.may_write(wait=False)
    with pytest.raises(PeerLost, match="records nothing more"):
        membership.require_member()


def test_a_process_that_was_stopped_announces_no_checkpoint_that_the_next_leader_has_removed(
    make: Callable[..., Members], tmp_path: Path
) -> None:
    members = make((1, 1))
    membership = ElasticMembership(members.all[0], members.generation, HashStore())
    files = DurableFiles(membership, SnapshotBackup(membership), tmp_path)
    lineage = [(members.generation.id, 0)]
    checkpoint = Checkpoint(
        name=SnapshotName("g", 6), step=6, state={"lineage": lineage}, parameters={}
    )
    files.written(checkpoint, tmp_path / "step-00000006.pt")
    (tmp_path / "step-00000006.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError):
        files.written(checkpoint, tmp_path / "step-00000006.pt")


def test_a_witness_lets_either_machine_of_a_pair_continue(
    make: Callable[..., Members], tmp_path: object
) -> None:
    def open_witness() -> Witness:
        return Witness(store, nonce)

    store = FolderStore(tmp_path, "run", timedelta(seconds=LIMIT), make=True)  # type: ignore[arg-type]
    nonce = Witness.create(store)
    members = make((1, 1), open_witness, nonce)
    members.kill(0)
    value = agreed(members.next((1,)))
    assert {member.id for member in value.members} == ids(members, 1)


def test_a_member_that_makes_no_progress_is_expelled_after_a_timeout(
    make: Callable[..., Members],
) -> None:
    members = make((1, 1, 1))
    members.enter_step(3, 0, 1, 2)
    for one in members.all:
        one.report_progress(members.generation, 3)
    began = time.monotonic()
    while time.monotonic() - began < OPTIONS.timeout + 1.5:
        assert not any(event.wait(0.1) for event in members.interrupted)
    value = agreed(members.next((0, 2), error=CommTimeout("a timeout.")))
    assert {member.id for member in value.members} == ids(members, 0, 2)
    (refused,) = members.next((1,))
    assert isinstance(refused, OutsideWorld)
    assert "expelled" in str(refused)
    assert [event.broken for event in members.interrupted] == [False, True, False]
    assert members.all[0].may_write()
    assert not members.all[1].may_write()
    with pytest.raises(PeerLost):
        members.all[1].require_member(members.generation)


def test_a_member_that_works_outside_a_step_is_not_expelled_for_that(
    make: Callable[..., Members],
) -> None:
    members = make((1, 1, 1))
    members.enter_step(3, 0, 2)
    for rank, one in enumerate(members.all):
        one.report_progress(members.generation, 3 if rank == 1 else 4)
    assert not any(event.wait(OPTIONS.timeout) for event in members.interrupted)
    value = agreed(members.next((0, 2), error=CommTimeout("a timeout.")))
    assert {member.id for member in value.members} == ids(members, 0, 1, 2)
    members.kill(1)  # gone, wherever it stood
    value = agreed(members.next((0, 2), present=value))
    assert {member.id for member in value.members} == ids(members, 0, 2)


def test_one_that_is_behind_is_expelled_once_it_makes_no_progress_any_more(
    make: Callable[..., Members],
) -> None:
    members, step = make((1, 1, 1)), 1
    members.enter_step(1, 0, 1, 2)

    def report(behind: int) -> None:
        for rank, one in enumerate(members.all):
            one.report_progress(members.generation, step - behind if rank == 1 else step)

    for behind in (step, 1):  # in its first step, then slow
        began = time.monotonic()
        while time.monotonic() - began < OPTIONS.timeout + 1.0:
            step += behind == 1
            report(behind)
            assert not any(event.wait(0.1) for event in members.interrupted)
    assert members.interrupted[0].wait(LIMIT)
    (first, *_) = found = members.next((0, 2))
    assert {member.id for member in agreed(found).members} == ids(members, 0, 2)
    assert isinstance(first, Change)
    assert "has made no progress for" in first.causes[0]
    assert f"is in step {step}" in first.causes[0]


def test_progress_in_an_earlier_generation_does_not_count_in_the_next(
    make: Callable[..., Members],
) -> None:
    members = make((1, 1, 1))
    for rank, one in enumerate(members.all):
        one.report_progress(members.generation, 9 - rank)
    members.kill(2)
    following = agreed(members.next((0, 1)))
    interrupted = Interrupted()
    members.all[0].waits.attach(following, interrupted)
    members.all[0].report_progress(following, 4)
    assert not interrupted.wait(OPTIONS.timeout + 1.0)


def test_a_store_of_a_later_generation_serves_its_members(make: Callable[..., Members]) -> None:
    members = make((1, 1, 1))
    members.kill(0)
    value = agreed(members.next((1, 2)))
    groups = [Group.world(value, rank) for rank in range(2)]
    stores = [members.all[rank + 1].store_of(group) for rank, group in enumerate(groups)]
    stores[1].set("key", "value")
    assert stores[0].get("key") == b"value"


def test_a_member_that_ends_well_is_no_loss(make: Callable[..., Members]) -> None:
    members = make((1, 1, 1))
    members.all[2].leave()
    members.kill(2)
    assert not members.interrupted[0].wait(0.6)


def test_members_that_lost_a_part_continue_from_the_newest_checkpoint_that_one_can_read(
    make: Callable[..., Members],
) -> None:
    members = make((4,))
    file = Held(
        generation=members.generation.id, token=members.generation.key_prefix, step=4, durable=True
    )
    for rank, one in enumerate(members.all):
        own = (members.generation.members[rank].id,)
        held = (replace(held_by(members, rank, 6), parts=own, members=4),)
        assert one.acknowledge(members.generation, (*held, file) if rank == 3 else held)
    members.kill(1, 2)
    value = agreed(members.next((0, 3)))
    assert {member.id for member in value.members} == ids(members, 0, 3)
    assert (value.start, value.start_token) == (4, "")
    members.kill(3)
    alone = agreed(members.next((0,), value))  # no record of the next generation has a checkpoint
    assert (alone.start, alone.start_token) == (0, "")


def test_members_that_are_lost_together_leave_together_however_apart_they_are_noticed(
    make: Callable[..., Members],
) -> None:
    members = make((4,))
    lost = [members.generation.members[rank].id for rank in (1, 2)]
    ended = threading.Event()

    def notice(one: VotingMember) -> None:
        assert ended.wait(LIMIT)
        one._watch._note(lost[0], closed_at=time.monotonic() - CLOSED_GRACE_S)
        one.closed(lost[1], "lost")
        one._judge_once()  # the first is suspected, and not yet the second

    for rank in (0, 3):
        members.all[rank].line.post(lambda one=members.all[rank]: notice(one))
    members.kill(1, 2)
    ended.set()
    value = agreed(members.next((0, 3)))
    assert {member.id for member in value.members} == ids(members, 0, 3)


def test_one_member_that_needs_no_other_part_continues_from_the_snapshot(
    make: Callable[..., Members],
) -> None:
    members = make((3,))
    for rank, one in enumerate(members.all):
        own = (members.generation.members[rank].id,)
        held = replace(held_by(members, rank, 6), parts=own, complete=rank == 0)
        assert one.acknowledge(members.generation, (held,))
    members.kill(2)
    value = agreed(members.next((0, 1)))
    assert value.start_token == members.generation.key_prefix
    for rank in (0, 1):
        held = held_by(members, rank, 6)
        own = (members.generation.members[rank].id,)
        assert members.all[rank].acknowledge(value, (replace(held, parts=own, complete=rank == 0),))
    members.kill(1)  # before the new generation commits anything
    alone = agreed(members.next((0,), value))
    assert (alone.start, alone.start_token) == (6, members.generation.key_prefix)


def test_a_request_to_end_the_run_reaches_all_once_and_ends_the_votes(
    make: Callable[..., Members],
) -> None:
    members = make((1, 1, 1))
    asked = [threading.Event() for _ in members.all]
    for one, event in zip(members.all, asked, strict=True):
        one.when_end_is_asked(lambda supervised, event=event: event.set())
    members.all[1].end_run("stopped by SIGTERM.", 143)
    assert asked[0].wait(LIMIT)
    assert asked[2].wait(LIMIT)
    assert not asked[1].is_set()
    members.kill(1)  # it ends sooner than the others: no loss
    assert not members.interrupted[0].wait(2 * CLOSED_GRACE_S)
    assert not members.interrupted[2].is_set()


def test_an_error_that_ends_the_run_is_no_loss_and_one_that_follows_from_a_loss_may_be(
    make: Callable[..., Members],
) -> None:
    members = make((1, 1, 1))
    asked = [threading.Event() for _ in members.all]
    for one, event in zip(members.all, asked, strict=True):
        one.when_end_is_asked(lambda supervised, event=event: event.set())
    membership = ElasticMembership(members.all[1], members.generation, HashStore())
    membership.leave(FailureReport.of(CommTimeout("rank 1 waited 3 s for a peer")))
    assert not any(event.is_set() for event in asked)
    membership.leave(FailureReport.of(CheckpointError("the disk is full")))
    assert asked[0].wait(LIMIT)
    assert asked[2].wait(LIMIT)
    members.kill(1)  # long after its connections have ended
    assert not members.interrupted[0].wait(2 * CLOSED_GRACE_S)
    assert not members.interrupted[2].is_set()
