"""What every source must do, over a database or not; CONTRIBUTING.md's is one of them."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import numpy as np
import pytest

from paceline.data.db.open_database import open_database
from paceline.data.order import Order
from paceline.data.source import Record, Source
from paceline.errors import ConfigError, DataError
from tests.harness.data.databases import write_lmdb
from tests.harness.data.loading import RICH, epoch_of, loader_of, photographs
from tests.harness.data.record_bytes import encoded_tensorprotos

RECORDS = photographs(12)
MODULE = "zip_source"


@dataclass(frozen=True)
class Kind:
    """A kind of source.

    Attributes:
        write: writes records to a path.
        open: opens the source there.
    """

    write: Callable[[Path, Sequence[Record]], None]
    open: Callable[[Path], Source]

    def source(self, path: Path, records: Sequence[Record] = RECORDS) -> Source:
        """Write a source and open it."""
        self.write(path, records)
        return self.open(path)


@pytest.fixture(scope="module", autouse=True)
def contributed() -> Iterator[None]:
    """The module that CONTRIBUTING.md shows as an example."""
    text = Path(__file__, "../../../CONTRIBUTING.md").resolve().read_text()
    chapter = text[text.index("## How to add a source") :]
    module = ModuleType(MODULE)
    exec(chapter[chapter.index("```python") + 10 : chapter.index("```\n\nThen")], module.__dict__)
    sys.modules[MODULE] = module  # where pickle looks for its class
    yield
    del sys.modules[MODULE]


def lmdb_of(path: Path, records: Sequence[Record]) -> None:
    path.mkdir()
    values = [encoded_tensorprotos(bytes(record.image), record.label) for record in records]
    write_lmdb(path, [(b"%04d" % i, value) for i, value in enumerate(values)])


def zip_of(path: Path, records: Sequence[Record]) -> None:
    with ZipFile(path, "w") as archive:
        for i, record in enumerate(records):
            archive.writestr(f"{record.label}/{i:04}.jpg", bytes(record.image))


def zip_source(path: Path) -> Source:
    source: Source = sys.modules[MODULE].ZipSource(path)
    return source


SOURCES = {
    "lmdb": Kind(lmdb_of, open_database),
    "zip (CONTRIBUTING's)": Kind(zip_of, zip_source),
}


@pytest.fixture(params=SOURCES)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each kind of source."""
    return SOURCES[request.param]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the source is."""
    return tmp_path / "data"


def contents(source: Source) -> list[tuple[bytes, int]]:
    return [(bytes(source[i].image), source[i].label) for i in range(len(source))]


def test_a_source_has_the_records_that_were_written(kind: Kind, path: Path) -> None:
    source = kind.source(path)
    assert sorted(contents(source)) == sorted((bytes(r.image), r.label) for r in RECORDS)
    if source.labels is not None:
        assert source.labels.dtype == np.int64
        assert source.labels.tolist() == [label for _, label in contents(source)]
    assert len({source.name(i) for i in range(len(source))}) == len(RECORDS)
    source.close()


def test_a_number_names_the_same_record_at_each_opening(kind: Kind, path: Path) -> None:
    one = kind.source(path)
    again = kind.open(path)
    assert contents(one) == contents(again)
    assert one.fingerprint == again.fingerprint
    one.close()
    assert contents(again)
    again.close()


@pytest.mark.parametrize("index", [-1, len(RECORDS)])
def test_there_is_no_other_number(kind: Kind, path: Path, index: int) -> None:
    source = kind.source(path)
    with pytest.raises(IndexError):
        source[index]
    source.close()


def test_other_data_has_another_fingerprint(kind: Kind, tmp_path: Path) -> None:
    changed = [Record(RECORDS[0].image, 1 - RECORDS[0].label), *RECORDS[1:]]
    prints = set()
    for number, records in enumerate((RECORDS, RECORDS[:-1], changed)):
        source = kind.source(tmp_path / str(number), records)
        prints.add(source.fingerprint)
        source.close()
    assert len(prints) == 3


def test_many_threads_read_the_same_records(kind: Kind, path: Path) -> None:
    source = kind.source(path)
    expected = contents(source)
    with ThreadPoolExecutor(8) as pool:
        assert all(found == expected for found in pool.map(contents, [source] * 16))
    source.close()


def test_a_pickled_source_reads_as_in_a_decode_process(kind: Kind, path: Path) -> None:
    source = kind.source(path)
    expected = contents(source)
    again: Source = pickle.loads(pickle.dumps(source))
    source.close()
    assert contents(again) == expected
    again.close()


def test_a_loader_makes_batches_of_it(kind: Kind, path: Path) -> None:
    order = Order(size=len(RECORDS), batch_size=5, seed=3)
    source = kind.source(path)
    with loader_of(source, 5, order=order, transform=RICH) as loader:
        batches = epoch_of(loader, epoch=1)
    labels = [label for batch in batches for label in batch.labels.tolist()]
    assert labels == [source[i].label for i in order.epoch_indices(1).tolist()]
    assert all(batch.images.std() > 0 for batch in batches)
    source.close()


def test_a_damaged_record_is_an_error_that_names_it(kind: Kind, path: Path) -> None:
    source = kind.source(path)
    images = [bytes(source[i].image) for i in range(len(source))]
    source.close()
    file = path / "data.mdb" if path.is_dir() else path
    file.write_bytes(file.read_bytes().replace(images[7], bytes(len(images[7]))))
    source = kind.open(path)
    with loader_of(source, 4, order=Order(size=12, batch_size=4, shuffle=False)) as loader:
        loader.batch(0, 0)
        with pytest.raises(DataError) as caught:
            loader.batch(0, 1)
    assert source.name(7) in str(caught.value)
    source.close()


def test_a_source_without_records_is_an_error(kind: Kind, path: Path) -> None:
    with pytest.raises(DataError, match="holds no records"):
        kind.source(path, [])


def test_a_path_that_leads_nowhere_is_an_error(kind: Kind, path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such"):
        kind.open(path)


def test_other_data_than_the_sources_is_an_error(kind: Kind, path: Path) -> None:
    path.write_bytes(b"these bytes are something else")
    with pytest.raises((ConfigError, DataError), match=r"check the path|copy it again"):
        kind.open(path)
