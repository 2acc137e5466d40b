"""Read a whole database and report what is in it: every record is decoded once.

records → read, check (threads) → counts, in the order of the keys
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from tempfile import TemporaryDirectory

from paceline.config.db import DbInfoConfig, DbType
from paceline.data.database_files import LMDB_DATA
from paceline.data.formats import RecordFormat, printable
from paceline.data.image_file import DamagedImage, ImageFacts, check_image
from paceline.data.index import load_index
from paceline.data.keys import KeyList
from paceline.data.leveldb_source import LevelDbSource
from paceline.data.lmdb_source import LmdbSource
from paceline.data.ordered import Meter, ordered_map
from paceline.errors import DataError

_SOURCES: dict[DbType, type[LmdbSource] | type[LevelDbSource]] = {
    "lmdb": LmdbSource,
    "leveldb": LevelDbSource,
}


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Pixels of images' sides: the smallest, the middle and the largest."""

    smallest: int
    middle: int
    largest: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a database holds; counts leave damaged records out.

    Attributes:
        records: all of them, damaged ones too.
        encodings: number of images by kind: "jpeg", "png", "raw" …
        sizes: number of images by (width, height).
        labels: number of records by label.
        label_names: the labels' names, where they are known.
        damaged: number of damaged records.
        first_damaged: what is wrong with the first one; names its key.
    """

    path: Path
    db_type: DbType
    records: int
    record_format: RecordFormat
    encodings: Mapping[str, int]
    sizes: Mapping[tuple[int, int], int]
    labels: Mapping[int, int]
    label_names: tuple[str, ...] | None
    damaged: int
    first_damaged: str | None

    @property
    def widths(self) -> Sides:
        """The images' widths."""
        return _sides(Counter(width for width, _ in Counter(self.sizes).elements()))

    @property
    def heights(self) -> Sides:
        """The images' heights."""
        return _sides(Counter(height for _, height in Counter(self.sizes).elements()))


def inspect_database(config: DbInfoConfig, meter: Meter) -> Report:
    """Read and decode all records of a database.

    Raises:
        ConfigError: there is no database.
        DataError: it can't be read at all, or its first record is of no known format.
    """
    db_type: DbType = "lmdb" if (config.path / LMDB_DATA).exists() else "leveldb"
    with TemporaryDirectory(prefix="paceline-") as scratch:
        cache_dir = config.cache_dir or Path(scratch)
        with closing(_SOURCES[db_type](config.path, cache_dir=cache_dir)) as source:
            tally = _tally(source, _keys(config.path, cache_dir), config.workers, meter)
            return Report(
                path=config.path,
                db_type=db_type,
                records=len(source),
                record_format=source.format,
                encodings=tally.encodings,
                sizes=tally.sizes,
                labels=tally.labels,
                label_names=source.label_names,
                damaged=len(source) - tally.labels.total(),
                first_damaged=tally.first_damaged,
            )


@dataclass
class _Tally:
    encodings: Counter[str]
    sizes: Counter[tuple[int, int]]
    labels: Counter[int]
    first_damaged: str | None = None


def _keys(path: Path, cache_dir: Path) -> KeyList:
    index = load_index(path, cache_dir=cache_dir)
    assert index is not None, "opening the database has saved its index"
    return index.keys


def _tally(source: LmdbSource | LevelDbSource, keys: KeyList, workers: int, meter: Meter) -> _Tally:
    tally = _Tally(Counter(), Counter(), Counter())
    examine = _examiner(source, keys)
    with closing(
        ordered_map(examine, range(len(source)), workers=workers, meter=meter)
    ) as findings:
        for finding in findings:
            if isinstance(finding, str):
                tally.first_damaged = tally.first_damaged or finding
            else:
                facts, label = finding
                tally.encodings[facts.encoding] += 1
                tally.sizes[facts.width, facts.height] += 1
                tally.labels[label] += 1
    return tally


def _examiner(
    source: LmdbSource | LevelDbSource, keys: KeyList
) -> Callable[[int], tuple[ImageFacts, int] | str]:
    """Make a function of a record's number that returns its facts and label, or what is wrong."""

    def examine(number: int) -> tuple[ImageFacts, int] | str:
        try:
            record = source[number]
            return check_image(record.image), record.label
        except DamagedImage as error:
            return f"Record {printable(keys[number])} has a damaged image: {error}."
        except DataError as error:
            return str(error)

    return examine


def _sides(counts: Counter[int]) -> Sides:
    values = sorted(counts.elements())
    return Sides(smallest=values[0], middle=median_low(values), largest=values[-1])
