"""What a process saves, and says of it, by the error that ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster.membership.generation_waits import OutsideWorld
from paceline.cluster.supervision.supervisor import RESUMES, save_after
from paceline.errors import CommError, DataError, Diverged

RUN = Path("runs/first")


def outside(*, expelled: bool = False, others_continue: bool = False) -> OutsideWorld:
    error = OutsideWorld("the link is cut")
    error.expelled, error.others_continue = expelled, others_continue
    return error


@pytest.mark.parametrize("error", [None, DataError("record 7 is damaged"), CommError("lost")])
def test_an_error_lets_rank_0_alone_write(error: BaseException | None) -> None:
    asked: list[bool] = []

    def save(leaderless: bool) -> int:
        asked.append(leaderless)
        return 7

    said = save_after(error, RUN, save, first_here=True)
    assert said == f"the state after 7 steps is saved in runs/first, and {RESUMES}."
    assert asked == [False]


def test_a_diverged_run_isnt_said_to_resume() -> None:
    said = save_after(Diverged("NaN"), RUN, lambda leaderless: 7, first_here=True)
    saved = "the state after 7 steps is saved in runs/first, and the same command would diverge"
    assert said == f"{saved} again from there."


@pytest.mark.parametrize("first_here", [False, True])
def test_on_the_losing_side_the_first_process_of_a_machine_writes(first_here: bool) -> None:
    def save(leaderless: bool) -> int | None:
        return 7 if leaderless else None

    said = save_after(outside(others_continue=True), RUN, save, first_here=first_here)
    saved = "the state after 7 steps is saved in runs/first, and the run continues on other"
    assert said == (f"{saved} machines." if first_here else "")
    here = save_after(outside(), RUN, save, first_here=first_here)
    assert here.endswith(f"{RESUMES}." if first_here else "")


def test_an_expelled_process_writes_nothing() -> None:
    caused = CommError("rank 1 was lost")
    caused.__cause__ = outside(expelled=True, others_continue=True)
    for error in (outside(expelled=True, others_continue=True), caused):
        assert (
            save_after(error, RUN, lambda leaderless: pytest.fail("it wrote"), first_here=True)
            == ""
        )
