"""The recorder of a member that may be outside the world."""

from __future__ import annotations

import pytest

from paceline.errors import PeerLost
from paceline.recorder import MemberRecorder, NullRecorder
from tests.harness.membership.given_membership import GivenMembership


class Names(NullRecorder):
    """Recorder of the events' names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def event(self, name: str, **fields: object) -> None:
        self.names.append(name)


def refuse() -> None:
    raise PeerLost("outside")


def test_a_member_outside_the_world_records_no_results() -> None:
    names = Names()
    recorder = MemberRecorder(names, GivenMembership(require_member=refuse))
    for name in ("step", "loss", "epoch", "speeds", "merge", "replay"):
        with pytest.raises(PeerLost):
            recorder.event(name)
    with pytest.raises(PeerLost):
        recorder.event("checkpoint", in_step=True)
    recorder.event("change")
    recorder.event("checkpoint")  # the one of the losing side
    assert names.names == ["change", "checkpoint"]


def test_a_member_of_the_world_records_all() -> None:
    names = Names()
    recorder = MemberRecorder(names, GivenMembership())
    recorder.event("step", step=1)
    assert names.names == ["step"]
