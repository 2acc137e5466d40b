"""`--bad_records` in whole runs: what is skipped is told and counted, or named at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.data.databases import key, write_lmdb
from tests.harness.data.image_folder import file_of, ramp
from tests.harness.data.record_bytes import encoded_tensorprotos
from tests.harness.processes.command import run
from tests.harness.processes.run_folders import events

SIZE = 14
WORDS = (
    *("train", "--train_data", "data", "--model", "resnet20", "--image_size", "32"),
    *("--augment", "pad", "--num_labels", "3", "--batch_size", "4", "--num_epochs", "2"),
    *("--num_workers", "2", "--run_id", "r"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Fourteen images: record 3's file is cut off, record 8 has label 7, record 11 is junk."""
    values = [
        encoded_tensorprotos(file_of(ramp(32, 32, seed=i), "JPEG"), i % 3) for i in range(SIZE)
    ]
    values[3] = encoded_tensorprotos(file_of(ramp(32, 32), "JPEG")[:-50], 0)
    values[8] = encoded_tensorprotos(file_of(ramp(32, 32), "JPEG"), 7)
    values[11] = b"junk"
    write_lmdb(tmp_path / "data", [(key(i), value) for i, value in enumerate(values)])
    return tmp_path


def test_skipped_records_are_told_and_counted_and_the_rest_is_trained(folder: Path) -> None:
    ended = run(*WORDS, "--bad_records", "skip", folder=folder)
    assert ended.status == 0, ended.text
    ranks = [events(folder / "runs/r", rank) for rank in (0, 1)]
    steps = [event for rank in ranks for event in rank if event["event"] == "step"]
    for epoch in (0, 1):
        lines = [event for event in steps if event["epoch"] == epoch]
        assert sum(event["last"] - event["first"] for event in lines) == SIZE
        assert sum(event["skipped"] for event in lines) == 3
    notes = " ".join(e["text"] for rank in ranks for e in rank if e["event"] == "note")
    for number, told in ((3, "can't be decoded"), (8, "has the label 7"), (11, "neither")):
        assert f'record "{key(number).decode()}" of data' in notes
        assert told in notes
    epochs = [event for event in ranks[0] if event["event"] == "epoch"]
    assert [event["samples"] for event in epochs] == [SIZE - 3] * 2


def test_otherwise_the_first_bad_record_ends_the_run_with_its_key_and_the_remedies(
    folder: Path,
) -> None:
    ended = run(*WORDS, folder=folder)
    assert ended.status == 1
    assert 'record "000000' in ended.text
    assert "of data" in ended.text
    assert (
        "Use --bad_records skip to leave out such records, or `paceline db info` to find them"
        in " ".join(ended.text.split())
    )
    assert "Traceback" not in ended.text
