"""Read a whole database and report what is in it: every record is decoded once.

records → read, check (processes) → counts, in the order of the keys
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median_low

from paceline.config.db import DbInfoConfig, DbType, RecordFormat
from paceline.data.db.database_files import kind_of
from paceline.data.db.indexed_source import IndexedSource
from paceline.data.db.open_database import open_database
from paceline.data.image.image_errors import DamagedImage
from paceline.data.image.image_file import check_image
from paceline.data.ordered_map import Meter, ordered_map
from paceline.errors import DataError


@dataclass(kw_only=True)
class Report:
    """Summary of a database's contents; only `records` counts damaged records too.

    Attributes:
        records: number of records, including damaged ones.
        label_names: the labels' names; None if unknown.
        encodings: number of images by kind: "jpeg", "png", "raw" …
        sizes: number of images by (width, height).
        labels: number of records by label.
        first_damaged: the key of the first damaged record, and what is wrong with it.
    """

    path: Path
    db_type: DbType
    records: int
    record_format: RecordFormat
    label_names: tuple[str, ...] | None
    encodings: Counter[str] = field(default_factory=Counter)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    labels: Counter[int] = field(default_factory=Counter)
    first_damaged: str | None = None

    @property
    def damaged(self) -> int:
        """The number of damaged records."""
        return self.records - self.labels.total()

    def sides(self, axis: int) -> tuple[int, int, int]:
        """Return the smallest, median and largest width (axis 0) or height (axis 1) in pixels."""
        values = sorted(size[axis] for size in self.sizes.elements())
        return values[0], median_low(values), values[-1]


def inspect_database(config: DbInfoConfig, meter: Meter) -> Report:
    """Read and decode all records of a database.

    Raises:
        ConfigError: there is no database.
        DataError: it can't be read at all, or its records are of no known format.
    """
    with closing(open_database(config.path, cache_dir=config.cache_dir)) as source:
        report = Report(
            path=config.path,
            db_type=kind_of(config.path),
            records=len(source),
            record_format=source.format,
            label_names=source.label_names,
        )
        examine = partial(_examine, source)
        with closing(
            ordered_map(
                examine, range(len(source)), noun="record", workers=config.workers, meter=meter
            )
        ) as findings:
            for finding in findings:
                if isinstance(finding, str):
                    report.first_damaged = report.first_damaged or finding
                else:
                    (encoding, size), label = finding
                    report.encodings[encoding] += 1
                    report.sizes[size] += 1
                    report.labels[label] += 1
    return report


def _examine(source: IndexedSource, number: int) -> tuple[tuple[str, tuple[int, int]], int] | str:
    """Return a record's (encoding, size) and label, or what is wrong with it."""
    try:
        record = source[number]
        return check_image(record.image), record.label
    except DamagedImage as error:
        return error.sentence(source.name(number))
    except DataError as error:
        return str(error)
