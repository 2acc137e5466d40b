"""The CSV log is Caffe2's to the letter."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Self

import pytest

from paceline.errors import PeerLost
from paceline.observe.csv_log import CsvLog, Totals, log_name
from tests.harness.membership.given_membership import GivenMembership
from tests.harness.processes.worlds import run_of

NOW = datetime(2018, 1, 2, 3, 4, 5)
EPOCH = {"seconds": 7.0, "accuracy": 0.25, "learning_rate": 0.1, "loss": 1.5}


def clock(*readings: float) -> Iterator[float]:
    return iter(readings)


def open_log(folder: Path, *readings: float, epoch: int = 0) -> CsvLog:
    times = clock(*readings)
    return CsvLog(
        folder,
        name=log_name("resnet50", 2, 64, 1000, 0.1),
        parameters={"batch_size": 64, "run_id": "r"},
        now=NOW,
        epoch=epoch,
        leadership=run_of(),
        clock=lambda: next(times),
    )


def test_the_file_is_named_after_the_run_and_the_time(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    log.close()
    assert log.path == tmp_path / "resnet50_gpu2_b64_L1000_lr0.10_v2_20180102_030405.log"
    assert log.path.exists()


@pytest.mark.parametrize(("rate", "written"), [(0.1, "0.10"), (0.025, "0.03"), (12.0, "12.00")])
def test_the_rate_in_the_name_has_two_decimals(rate: float, written: str) -> None:
    assert log_name("resnet18", 1, 32, 10, rate) == f"resnet18_gpu1_b32_L10_lr{written}_v2"


def test_two_epochs_are_two_rows_under_parameters_and_header(tmp_path: Path) -> None:
    log = open_log(tmp_path, 100.0, 110.0, 114.0)
    log.event("step", step=0)  # not an epoch: no row
    log.event("epoch", epoch=0, samples=400, batches=4, test_accuracy=None, **EPOCH)
    log.event("epoch", epoch=1, samples=400, batches=4, test_accuracy=0.375, top5=0.9, **EPOCH)
    log.close()
    assert log.path.read_text() == (
        "# Namespace(batch_size=64, run_id='r')\n"
        "time_spent,cumulative_time_spent,input_count,cumulative_input_count,"
        "cumulative_batch_count,inputs_per_sec,accuracy,epoch,learning_rate,loss,test_accuracy\n"
        "10,10,400,400,4,40,0.25,0,0.1,1.5,-1\n"
        "4,14,400,800,8,100,0.25,1,0.1,1.5,0.375\n"
    )


def test_a_row_is_in_the_file_before_the_log_is_closed(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0.0, 1.0)
    log.event("epoch", epoch=0, samples=400, batches=4, test_accuracy=None, **EPOCH)
    assert len(log.path.read_text().splitlines()) == 3
    log.close()


def test_a_resumed_run_continues_its_log_without_the_rows_that_it_repeats(tmp_path: Path) -> None:
    killed = open_log(tmp_path, 100.0, 110.0, 114.0, 120.0)
    for epoch in range(3):
        killed.event("epoch", epoch=epoch, samples=400, batches=4, test_accuracy=None, **EPOCH)
    killed.close()
    log = open_log(tmp_path, 50.0, 52.0, epoch=2)
    log.event("epoch", epoch=2, samples=400, batches=4, test_accuracy=0.5, **EPOCH)
    log.close()
    assert list(tmp_path.iterdir()) == [killed.path]
    with log.path.open() as file:
        assert next(file) == "# Namespace(batch_size=64, run_id='r')\n"
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert rows[-1]["cumulative_time_spent"] == "16"
    assert rows[-1]["cumulative_input_count"] == "1200"
    assert rows[-1]["cumulative_batch_count"] == "12"
    assert rows[-1]["inputs_per_sec"] == "200"


def test_a_torn_last_row_is_dropped(tmp_path: Path) -> None:
    first = open_log(tmp_path, 100.0, 110.0)
    first.event("epoch", epoch=0, samples=400, batches=4, test_accuracy=None, **EPOCH)
    first.close()
    with first.path.open("a") as file:
        file.write("4,14,400,8")
    open_log(tmp_path, 0.0, epoch=5).close()
    assert len(first.path.read_text().splitlines()) == 3


def test_a_parameter_with_line_breaks_stays_in_the_first_line(tmp_path: Path) -> None:
    log = CsvLog(tmp_path, name="x", parameters={"path": "a\nb"}, now=NOW, leadership=run_of())
    log.close()
    assert log.path.read_text().splitlines()[0] == "# Namespace(path='a\\nb')"


def test_a_damaged_row_of_an_earlier_part_is_left_out(tmp_path: Path) -> None:
    log = open_log(tmp_path, 100.0, 110.0)
    log.event("epoch", epoch=0, samples=400, batches=4, test_accuracy=None, **EPOCH)
    log.close()
    whole = log.path.read_text()
    with log.path.open("ab") as file:
        file.write(b"1,2,3\n" + b",".join([b"\xff"] * 11) + b"\n")
    open_log(tmp_path, 120.0, epoch=5).close()
    assert log.path.read_text() == whole


class Member:
    """A member's log, and whether the member is the leader."""

    def __init__(self, folder: Path, *, leads: bool, totals: Totals | None = None) -> None:
        self.leads, self._time = leads, 0.0
        self.log = CsvLog(
            folder,
            name="x_v2",
            parameters={},
            now=NOW,
            epoch=0 if totals is None else 1,
            totals=totals,
            leadership=self,
            clock=self._clock,
        )

    def _clock(self) -> float:
        self._time += 5.0
        return self._time

    def end_epoch(self, epoch: int) -> None:
        self.log.event("epoch", epoch=epoch, samples=400, batches=4, test_accuracy=None, **EPOCH)

    def become_leader(self, epoch: int) -> None:
        self.leads = True
        self.log.event("restore", epoch=epoch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.close()


def rows(folder: Path) -> list[tuple[str, str]]:
    """Return the epoch and the batches so far of each row."""
    (path,) = folder.glob("*.log")
    lines = path.read_text().splitlines()[1:]
    return [(row["epoch"], row["cumulative_batch_count"]) for row in csv.DictReader(lines)]


def test_a_process_outside_the_world_writes_no_row(tmp_path: Path) -> None:
    def refuse() -> None:
        raise PeerLost("outside")

    membership = GivenMembership(require_member=refuse)
    log = CsvLog(
        tmp_path, name="x", parameters={}, now=NOW, leadership=run_of(), membership=membership
    )
    before = log.path.read_bytes() if log.path else b""
    with pytest.raises(PeerLost):
        log.event("epoch", epoch=0, samples=400, batches=4, test_accuracy=None, **EPOCH)
    log.close()
    assert log.path
    assert log.path.read_bytes() == before


def test_only_the_leader_has_a_file(tmp_path: Path) -> None:
    member = Member(tmp_path, leads=False)
    member.end_epoch(0)
    member.log.close()
    assert list(tmp_path.iterdir()) == []


def test_the_next_leader_adds_the_row_that_the_lost_one_did_not_write(tmp_path: Path) -> None:
    with Member(tmp_path, leads=True) as lost, Member(tmp_path, leads=False) as other:
        for epoch in range(2):
            lost.end_epoch(epoch)
        for epoch in range(3):
            other.end_epoch(epoch)
        other.become_leader(3)
        other.end_epoch(3)
        assert other.log.recorded == 1  # nothing has shown the end of epoch 2
    assert rows(tmp_path) == [("0", "4"), ("1", "8"), ("2", "12"), ("3", "16")]


def test_the_next_leader_removes_rows_to_which_the_run_went_back(tmp_path: Path) -> None:
    with Member(tmp_path, leads=True) as lost, Member(tmp_path, leads=False) as other:
        for epoch in range(3):
            lost.end_epoch(epoch)
            other.end_epoch(epoch)
        other.become_leader(1)
        other.end_epoch(1)
        assert other.log.recorded == 2
    assert rows(tmp_path) == [("0", "4"), ("1", "8")]


def test_the_leader_knows_the_epochs_that_it_recorded_before_it_went_back(tmp_path: Path) -> None:
    with Member(tmp_path, leads=True) as member:
        for epoch in range(2):
            member.end_epoch(epoch)
        assert member.log.recorded == -1
        member.log.event("restore", epoch=1)
        assert member.log.recorded == 1
        member.end_epoch(1)
        member.end_epoch(2)
        assert member.log.recorded == 1


def test_an_earlier_start_has_recorded_nothing_in_this_one(tmp_path: Path) -> None:
    with Member(tmp_path, leads=True) as member:
        member.end_epoch(0)
    with Member(tmp_path, leads=True) as member:
        member.log.event("restore", epoch=0)
        assert member.log.recorded == -1


def test_the_next_leader_begins_a_file_in_its_own_folder_with_the_totals(tmp_path: Path) -> None:
    before = Totals(seconds=10.0, samples=400, batches=4)
    other = Member(tmp_path, leads=False, totals=before)
    other.end_epoch(1)
    other.become_leader(2)
    other.end_epoch(2)
    other.log.close()
    assert rows(tmp_path) == [("2", "12")]


def test_a_leader_that_is_one_no_longer_writes_nothing(tmp_path: Path) -> None:
    with Member(tmp_path, leads=True) as member:
        member.end_epoch(0)
        member.leads = False
        member.end_epoch(1)
    assert rows(tmp_path) == [("0", "4")]
