"""A configuration's databases: opened by their kind, refused with a sentence, or noted."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.cli.flags import parse
from paceline.config.train import TrainConfig
from paceline.data.db.index.database_index import write_index
from paceline.errors import ConfigError
from paceline.recorder import NullRecorder
from paceline.session.checks import check
from paceline.session.decoding import Decoding
from paceline.session.sources import open_sources
from tests.harness.data.databases import ENGINES, RECORDS, items, key, labels
from tests.harness.data.permissions import read_only
from tests.harness.data.record_bytes import bgr_planes, raw_datum
from tests.harness.processes.worlds import run_of

SMALL = (
    *("--model", "resnet20", "--image_size", "4", "--augment", "none", "--batch_size", "8"),
    *("--num_epochs", "3", "--num_workers", "1"),
)


CPU = torch.device("cpu")


class Notes(NullRecorder):
    """Keeps the notes' texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def event(self, name: str, **fields: object) -> None:
        assert name == "note"
        self.texts.append(str(fields["text"]))


def config_of(*words: object) -> TrainConfig:
    return parse(TrainConfig, [*SMALL, *map(str, words)], prog="paceline train", description="")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Records with labels 0 to 9, and an index that knows them."""
    folder = tmp_path / "train"
    ENGINES["lmdb"].write(folder, items())
    names = [f"class {i}" for i in range(10)]
    keys = [key(i) for i in range(RECORDS)]
    write_index(folder, keys=keys, labels=labels(), label_names=names, record_format="datum")
    return folder


@pytest.mark.parametrize("kind", ENGINES)
def test_a_database_of_each_kind_trains(kind: str, tmp_path: Path) -> None:
    ENGINES[kind].write(tmp_path / "train", items())
    config = config_of("--train_data", tmp_path / "train", "--db_type", kind, "--num_labels", 10)
    assert loaded(config)[0] == sorted(labels())


def test_a_minidb_may_be_its_one_file(tmp_path: Path) -> None:
    ENGINES["minidb"].write(tmp_path, items())
    path = (tmp_path / "data.minidb").rename(tmp_path / "train.minidb")
    config = config_of("--train_data", path, "--db_type", "minidb", "--num_labels", 10)
    assert loaded(config)[0] == sorted(labels())


def test_labels_beyond_num_labels_are_an_error_or_skipped_and_noted(database: Path) -> None:
    words = ("--train_data", database, "--num_labels", 8)
    with pytest.raises(ConfigError, match=r"--num_labels 8: .*train has labels up to 9; .* 10"):
        check(config_of(*words), 0)
    config = config_of(*words, "--bad_records", "skip")
    (note,) = check(config, 0)
    assert note.startswith("8 of 40 records have labels beyond --num_labels 8")
    kept, notes = loaded(config)
    assert kept == sorted(label for label in labels() if label < 8)
    assert len(notes) == 7
    assert '"00000' in notes[0]
    assert "8 bad records of epoch 0" in notes[-1]


def test_a_model_of_more_outputs_than_classes_is_noted_with_the_flag(database: Path) -> None:
    (note,) = check(config_of("--train_data", database), 0)
    assert note == (
        "the training data has 10 classes, but the model gets 1,000 outputs, as Caffe2's by "
        "default; use --num_labels 10."
    )
    (note,) = check(config_of("--train_data", database, "--num_labels", 12), 0)
    assert note.endswith(", but the model gets 12 outputs; use --num_labels 10.")
    assert check(config_of("--train_data", database, "--num_labels", 10), 0) == []


def test_labels_that_are_all_beyond_num_labels_are_an_error_in_any_case(tmp_path: Path) -> None:
    value = raw_datum(bgr_planes(np.zeros((4, 4, 3), np.uint8)), 5)
    ENGINES["lmdb"].write(tmp_path / "train", [(key(i), value) for i in range(4)])
    keys = [key(i) for i in range(4)]
    write_index(
        tmp_path / "train", keys=keys, labels=[5] * 4, label_names=None, record_format="datum"
    )
    words = ("--train_data", tmp_path / "train", "--num_labels", 3, "--bad_records", "skip")
    with pytest.raises(ConfigError, match="has labels up to 5; give at least 6"):
        open_sources(config_of(*words))


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's folders need root to make")
def test_a_database_in_a_folder_that_may_not_be_entered_is_refused(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    ENGINES["lmdb"].write(closed / "train", items())
    with (
        read_only(tmp_path),
        pytest.raises(ConfigError, match="train: you have no permission to read"),
    ):
        open_sources(config_of("--train_data", closed / "train"))


def loaded(config: TrainConfig) -> tuple[list[int], list[str]]:
    """The labels of an epoch, sorted, and the notes that were made."""
    sources, notes = open_sources(config), Notes()
    decoding = Decoding(config, run_of(recorder=notes), CPU)
    with closing(sources), closing(decoding):
        loader = decoding.loader(sources.train, train=True)
        order = loader.order
        batches = [loader.batch(order.place(0, step, 0, 1)) for step in range(order.steps)]
    found = [label for batch in batches for label in batch.labels[: batch.place.count].tolist()]
    return sorted(found), notes.texts
