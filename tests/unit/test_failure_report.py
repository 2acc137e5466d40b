"""Why a process ends, and what its user can do, in the sentence of its failure report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cluster.membership.generation_waits import Change, left_out, without_quorum
from paceline.cluster.stores.failure_report import FailureReport, cause
from paceline.cluster.supervision.machine_endpoint import WorkerExit, how_it_ended
from paceline.errors import CommTimeout, ConfigError, PeerLost
from tests.harness.processes.worlds import world_of

GENERATION = world_of((1, 1), 0).generation
NAME = "rank 0 on machine 0 (vm)"


def change(*, silent: bool) -> Change:
    return Change(
        generation=replace(GENERATION, members=GENERATION.members[1:]),
        lost=GENERATION.members[:1],
        left=False,
        silent=silent,
        causes=("",),
        detected_at=0.0,
        decided_at=0.0,
    )


def test_a_lost_peer_is_looked_for_in_its_output() -> None:
    report = FailureReport.of(PeerLost(rank=0, peer=1, operation="step 3", cause="it ended"))
    assert report.text.endswith(
        "Check the output of the lost process, and start the same command again."
    )
    assert report.consequence


def test_of_consequences_the_call_that_a_peer_did_not_make_is_the_cause() -> None:
    """The peer waits in another operation, and whichever rank times out first ends first."""
    elsewhere = FailureReport.of(CommTimeout("rank 1 waited in all_reduce of bucket 0."))
    lost = PeerLost(rank=0, peer=1, operation="the call", cause="it ended")
    lost.of_call = True
    of_call = FailureReport.of(lost.during("the call that all make").named("rank 1 on machine 0"))
    own = FailureReport.of(ConfigError("flag"))
    assert of_call.consequence
    assert FailureReport.from_text(of_call.to_text()) == of_call
    for failures in ([elsewhere, of_call], [of_call, elsewhere]):
        assert cause(failures) == of_call
        assert cause([*failures, own]) == own
    assert cause([]) is None


@pytest.mark.parametrize(
    ("silent", "sentence"),
    [
        (
            True,
            "This process has lost machine 1, where the run continues without it. Check the "
            "connections between the machines; the run's end is reported there.",
        ),
        (
            False,
            "This process was expelled from the run, because the others had no sign of life from "
            "it; they continue without it. Check whether it was stopped, or its machine "
            "overloaded.",
        ),
    ],
)
def test_a_member_without_which_the_others_continue_starts_nothing_again(
    silent: bool, sentence: str
) -> None:
    error = left_out(change(silent=silent))
    assert error.others_continue
    assert error.expelled != silent
    assert FailureReport.of(error).text == sentence


def test_a_side_without_a_quorum_looks_at_the_other_machines_first() -> None:
    error = without_quorum(GENERATION.members[0], "1 of 2 machines", [], was_stopped=False)
    assert not error.others_continue
    assert FailureReport.of(error).text.endswith(
        "Check the other machines and the connections to them; where the run has ended on all, "
        "start the same command again."
    )


@pytest.mark.parametrize(
    ("text", "how"),
    [
        (f"{NAME} was killed by SIGKILL. If no user killed it, …", "was killed by SIGKILL"),
        (f"{NAME} ended with status 3.", "ended with status 3"),
        (f"{NAME}: record 7 is damaged. Repair it.", "failed: record 7 is damaged"),
        (f"{NAME}: {NAME}: record 7 is damaged. Repair it.", "failed: record 7 is damaged"),
    ],
)
def test_how_a_worker_ended_does_not_name_it_again(text: str, how: str) -> None:
    end = WorkerExit(local_rank=0, member="start-0", name=NAME, text=text, failed=True)
    assert how_it_ended(end) == how
