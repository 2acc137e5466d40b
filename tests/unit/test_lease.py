"""Who counts as alive: the judgement over what one reader saw on its own clock."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from paceline.cluster.membership.leases.lease import Verdict
from paceline.cluster.membership.process_identity import ProcessIdentity, ask_kernel
from paceline.cluster.rendezvous.lease_watch import LeaseWatch, lease_key
from paceline.cluster.rendezvous.registration import Registration

HERE = ProcessIdentity.of_this_process()
FAR = replace(HERE, kernel="another machine's boot", pid=1, started=1)


def verdict(
    readings: list[tuple[float, bytes | None]],
    now: float,
    patch: pytest.MonkeyPatch,
    who: ProcessIdentity = FAR,
) -> Verdict:
    """Watch a counter that has these values at the given times; judge it at last."""
    store, owner = HashStore(), Registration(process=who, addresses=(), port=0)
    watch: LeaseWatch | None = None
    for moment, counter in readings:
        patch.setattr("time.monotonic", lambda moment=moment: moment)
        if counter is not None:
            store.set(lease_key(owner), counter)
        watch = watch or LeaseWatch(store, owner, HERE)
        watch.verdict()
    assert watch is not None
    patch.setattr("time.monotonic", lambda: now)
    return watch.verdict()


@pytest.mark.parametrize(
    ("readings", "now", "state", "reason"),
    [
        # One reading says nothing: a dead run's counter stands in the store like a live one's.
        ([(0, b"900")], 0.5, "unknown", "watched for 0.5 s only"),
        ([(0, b"900")], 5.1, "dead", "not advanced for 5.1 s"),
        ([(0, None)], 5.1, "dead", "not advanced for 5.1 s"),
        ([(0, b"1"), (1, b"1")], 1.0, "unknown", "watched for 1.0 s only"),
        ([(0, b"1"), (1, b"2")], 1.5, "alive", "advanced 0.5 s ago"),
        ([(0, None), (1, b"1")], 1.5, "alive", "advanced 0.5 s ago"),
        # A counter may begin anew: that it changed is what counts.
        ([(0, b"900"), (1, b"1")], 1.5, "alive", "advanced 0.5 s ago"),
        ([(0, b"1"), (1, b"2"), (4, b"2")], 5.9, "alive", "advanced 4.9 s ago"),
        ([(0, b"1"), (1, b"2"), (4, b"2")], 6.1, "dead", "not advanced for 5.1 s"),
        ([(0, b"1"), (1, b"2"), (9, b"3")], 9.0, "alive", "advanced 0.0 s ago"),
        ([(0, b"1"), (1, b"ended")], 1.0, "dead", "it gave up"),
    ],
)
def test_a_lease_is_judged_by_its_advance_on_the_readers_clock(
    readings: list[tuple[float, bytes | None]],
    now: float,
    state: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = verdict(readings, now, monkeypatch)
    assert (found.state, reason in found.reason) == (state, True), found


@pytest.mark.parametrize("offset", [-1e6, 0.0, 1e9])
def test_only_differences_of_one_clock_matter(
    offset: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: list[tuple[float, bytes | None]] = [(offset, b"1"), (offset + 1, b"2")]
    assert verdict(readings, offset + 2, monkeypatch).state == "alive"
    assert verdict(readings, offset + 7, monkeypatch).state == "dead"


def test_on_the_same_machine_a_running_process_is_alive_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert verdict([(0, b"1")], 0, monkeypatch, HERE).state == "alive"


def identity_of(pid: int) -> ProcessIdentity:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return replace(HERE, pid=pid, started=int(fields[19]))


def test_on_the_same_machine_an_ended_process_is_dead_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        who = identity_of(process.pid)
        assert ask_kernel(who, HERE) == "runs"
        process.kill()
    assert verdict([(0, b"1"), (0.1, b"2")], 0.1, monkeypatch, who).state == "dead"


def test_a_process_that_nobody_reaped_yet_has_ended() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        who = identity_of(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ask_kernel(who, HERE) == "ended"


def test_a_number_that_another_process_got_since_names_nobody() -> None:
    assert ask_kernel(replace(HERE, started=HERE.started - 1), HERE) == "ended"


def test_another_machines_process_number_means_nothing_here() -> None:
    assert ask_kernel(replace(FAR, pid=HERE.pid, started=HERE.started), HERE) == "elsewhere"
