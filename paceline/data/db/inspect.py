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

from paceline.config.db import DbInfoConfig, DbType, RecordFormat
from paceline.data.db.database_files import kind_of
from paceline.data.db.indexed_source import IndexedSource
from paceline.data.db.open_database import opened
from paceline.data.image.image_file import DamagedImage, ImageFacts, check_image
from paceline.data.ordered_map import Meter, ordered_map
from paceline.errors import DataError


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
        DataError: it can't be read at all, or its records are of no known format.
    """
    with opened(config.path, config.cache_dir) as source:
        tally = _tally(source, config.workers, meter)
        return Report(
            path=config.path,
            db_type=kind_of(config.path),
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


def _tally(source: IndexedSource, workers: int, meter: Meter) -> _Tally:
    tally = _Tally(Counter(), Counter(), Counter())
    examine = _examiner(source)
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


def _examiner(source: IndexedSource) -> Callable[[int], tuple[ImageFacts, int] | str]:
    """Make a function of a record's number that returns its facts and label, or what is wrong."""

    def examine(number: int) -> tuple[ImageFacts, int] | str:
        try:
            record = source[number]
            return check_image(record.image), record.label
        except DamagedImage as error:
            return f"{source.name(number)} has a damaged image: {error}."
        except DataError as error:
            return str(error)

    return examine


def _sides(counts: Counter[int]) -> Sides:
    values = sorted(counts.elements())
    return Sides(smallest=values[0], middle=median_low(values), largest=values[-1])
