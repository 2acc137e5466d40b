"""A member's backups: confirmed parts, copies for others, and what votes find recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.errors import CommError, CommTimeout, ConfigError
from paceline.snapshots.backup import superseded
from paceline.snapshots.own_part import OwnPart
from tests.harness.equivalence.backup_members import BackupMembers
from tests.harness.membership.missing_parts import missing_parts

LIMIT = 20.0
MEMBERS = ("a", "b", "c")  # the holder of each is the next one


@pytest.fixture
def members() -> Iterator[BackupMembers]:
    members = BackupMembers()
    for each in MEMBERS:
        members.join(each).begin_generation("g/0")
    yield members
    members.close()


def name(step: int, token: str = "g/0") -> SnapshotName:
    return SnapshotName(token, step)


def part(value: float) -> OwnPart:
    return OwnPart(state={"w": (0, 2, torch.full((2,), value))}, sent={4: torch.ones(1)})


def hold(members: BackupMembers, owner: str, at: SnapshotName, value: float = 1.0) -> None:
    """Hold a snapshot at a member."""
    holder = MEMBERS[(MEMBERS.index(owner) + 1) % 3]
    backup = members.backups[owner]
    backup.hold(at, part(value), owner=owner, holder=holder, whole=MEMBERS, completed=at.step)


def hold_all(members: BackupMembers, at: SnapshotName) -> None:
    """Hold a snapshot everywhere, and wait until all acknowledge it."""
    for value, owner in enumerate(MEMBERS):
        hold(members, owner, at, float(value))
    for backup in members.backups.values():
        backup.wait(at, LIMIT)


def recorded(members: BackupMembers, member: str) -> dict[SnapshotName, str]:
    """Return what a member's record lists: its parts of each snapshot."""
    held = members.records[member].held
    return {at: "".join(sorted(one.parts)) for at, one in held.items()}


def test_a_snapshot_is_acknowledged_once_its_part_is_confirmed(members: BackupMembers) -> None:
    members.open.clear()
    hold(members, "a", name(5))
    backup = members.backups["a"]
    assert not backup.acknowledges(name(5))
    assert recorded(members, "a") == {name(5): "a"}
    members.open.set()
    backup.wait(name(5), LIMIT)
    assert backup.acknowledges(name(5))
    assert not backup.acknowledges(name(6))


def test_a_member_alone_acknowledges_at_once(members: BackupMembers) -> None:
    backup = members.backups["a"]
    backup.hold(name(5), part(1), owner="a", holder=None, whole=("a",), completed=5)
    assert backup.acknowledges(name(5))
    assert not members.delivered


def test_the_record_lists_copies_of_snapshots_that_are_held(members: BackupMembers) -> None:
    hold(members, "a", name(5), 0.0)
    members.backups["a"].wait(name(5), LIMIT)
    assert recorded(members, "b") == {}  # b doesn't hold the snapshot yet
    hold_all(members, name(5))
    assert [recorded(members, one) for one in MEMBERS] == [
        {name(5): parts} for parts in ("ac", "ab", "bc")
    ]
    (copy,) = members.backups["b"].parts(name(5), ["a", "c"])
    assert copy.state["w"][2].tolist() == [0.0, 0.0]
    assert copy.sent[4].tolist() == [1.0]


def test_the_loss_of_an_owner_and_its_holder_is_found(members: BackupMembers) -> None:
    hold_all(members, name(5))
    held = {one: members.records[one].held[name(5)] for one in MEMBERS}
    assert missing_parts(MEMBERS, [held["b"].parts, held["c"].parts]) == ()
    assert missing_parts(MEMBERS, [held["c"].parts]) == ("a",)
    assert members.backups["c"].parts(name(5), ["a"]) == []


def test_after_a_promise_nothing_is_acknowledged_confirmed_or_dropped(
    members: BackupMembers,
) -> None:
    hold_all(members, name(5))
    members.open.clear()
    hold(members, "a", name(7))  # a's part of 7 is under way to b
    listed = recorded(members, "b")
    members.records["b"].promise()
    members.open.set()
    with pytest.raises(CommTimeout, match="didn't confirm its copy of the snapshot before step 7"):
        members.backups["a"].wait(name(7), 0.2)
    assert members.backups["b"].parts(name(7), ["a"]) == []
    hold(members, "b", name(7))
    with pytest.raises(CommError, match="generation of the world ends"):
        members.backups["b"].wait(name(7), LIMIT)  # c confirms; b doesn't acknowledge
    with pytest.raises(CommError, match="generation of the world ends"):
        members.backups["b"].commit(name(7), [name(7)])
    assert recorded(members, "b") == listed
    assert len(members.backups["b"].parts(name(5), ["a"])) == 1


def test_a_commit_drops_older_snapshots_and_copies(members: BackupMembers) -> None:
    hold_all(members, name(5))
    hold_all(members, name(7))
    hold(members, "a", name(9))
    members.backups["a"].wait(name(9), LIMIT)
    backup = members.backups["b"]
    backup.commit(name(7), [name(7)])
    assert recorded(members, "b") == {name(7): "ab"}
    assert [len(backup.parts(name(step), ["a"])) for step in (5, 7, 9)] == [0, 1, 1]


def require_dropped(members: BackupMembers, at: SnapshotName) -> None:
    """Require that b neither holds nor confirms a part of a."""
    before = members.confirmations
    members.send("a", "b", "backup", {"token": at.token, "step": at.step, "owner": "a"}, b"part")
    assert members.backups["b"].parts(at, ["a"]) == []
    assert members.confirmations == before


def test_entering_a_generation_leaves_its_start_and_its_copies(members: BackupMembers) -> None:
    hold_all(members, name(5))
    hold_all(members, name(7))
    backup = members.backups["b"]
    backup.leave_generation([name(5)])
    assert backup.parts(name(7), ["a"]) == []
    require_dropped(members, name(8))  # between generations
    backup.begin_generation("g/1")
    require_dropped(members, name(8))  # a late one
    assert recorded(members, "b") == {name(5): "ab"}
    assert len(backup.parts(name(5), ["a"])) == 1
    for each in "ac":
        members.backups[each].leave_generation([name(5)])
        members.backups[each].begin_generation("g/1")
    hold_all(members, name(6, "g/1/1"))
    backup.commit(name(6, "g/1/1"), [name(6, "g/1/1")])
    assert recorded(members, "b") == {name(6, "g/1/1"): "ab"}
    assert backup.parts(name(5), ["a"]) == []


def test_a_commit_drops_copies_of_owners_that_are_gone() -> None:
    copies = [(name(5), "lost"), (name(5), "a"), (name(6, "g/1/1"), "a")]
    dropped = superseded(copies, name(6, "g/1/1"), "g/1")
    assert sorted(dropped) == [(name(5), "a"), (name(5), "lost")]


def test_a_start_that_is_needed_again_has_its_copies_still(members: BackupMembers) -> None:
    hold_all(members, name(5))
    for each in "bc":
        for prefix in ("g/1", "g/2"):
            members.backups[each].leave_generation([name(5)])
            members.backups[each].begin_generation(prefix)
    (copy,) = members.backups["b"].parts(name(5), ["a"])
    assert copy.state["w"][2].tolist() == [0.0, 0.0]


def test_a_wait_ends_when_the_generation_does(members: BackupMembers) -> None:
    members.open.clear()
    hold(members, "a", name(5))
    backup = members.backups["a"]
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            backup.wait(name(5), LIMIT)
        except CommError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    backup.interrupt()
    waiting.join(LIMIT)
    assert "generation of the world ends" in str(ended[0])
    backup.begin_generation("g/0")
    members.open.set()
    backup.wait(name(5), LIMIT)


def test_a_part_of_which_no_copy_can_be_made_is_an_error(members: BackupMembers) -> None:
    backup = members.backups["a"]
    own = OwnPart(state={"w": {1}}, sent={})
    backup.hold(name(5), own, owner="a", holder="b", whole=MEMBERS, completed=5)
    with pytest.raises(ConfigError, match=r"builtins\.set"):
        backup.wait(name(5), LIMIT)
