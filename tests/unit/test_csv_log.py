"""The CSV log is Caffe2's to the letter."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from paceline.observe.csv_log import CsvLog, Totals, log_name

NOW = datetime(2018, 1, 2, 3, 4, 5)
EPOCH = {"seconds": 7.0, "accuracy": 0.25, "learning_rate": 0.1, "loss": 1.5}


def clock(*readings: float) -> Iterator[float]:
    return iter(readings)


def open_log(folder: Path, *readings: float, totals: Totals | None = None) -> CsvLog:
    times = clock(*readings)
    return CsvLog(
        folder,
        name=log_name("resnet50", 2, 64, 1000, 0.1),
        parameters={"batch_size": 64, "run_id": "r"},
        now=NOW,
        totals=totals,
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


def test_a_resumed_runs_totals_go_on(tmp_path: Path) -> None:
    log = open_log(tmp_path, 50.0, 52.0, totals=Totals(seconds=14.0, samples=800, batches=8))
    log.event("epoch", epoch=2, samples=400, batches=4, test_accuracy=None, **EPOCH)
    log.close()
    with log.path.open() as file:
        next(file)  # the parameters
        row = next(csv.DictReader(file))
    assert row["cumulative_time_spent"] == "16"
    assert row["cumulative_input_count"] == "1200"
    assert row["cumulative_batch_count"] == "12"
    assert row["inputs_per_sec"] == "200"


def test_a_parameter_with_line_breaks_stays_in_the_first_line(tmp_path: Path) -> None:
    log = CsvLog(tmp_path, name="x", parameters={"path": "a\nb"}, now=NOW)
    log.close()
    assert log.path.read_text().splitlines()[0] == "# Namespace(path='a\\nb')"
