"""A new database, whole and with its index under its final name, or not there at all.

with new_database(dest, …) as database:      dest is free? a staging folder beside it
    database.put(key, value, label) …        a full disk becomes a sentence
                                             index, to the disk, renamed to dest
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paceline.config.db import DbType, RecordFormat
from paceline.data.db.index.database_index import write_index
from paceline.data.db.write.reduced_images import ReducedImages
from paceline.data.db.write.staged_folder import check_destination, staged
from paceline.data.db.write.writers import WRITE_ERRORS, WRITERS, Writer
from paceline.errors import DataError


@dataclass(kw_only=True)
class NewDatabase:
    """Database under construction, renamed to its destination when complete.

    Attributes:
        writer: writes the database's files.
        classes: the classes' names, in the order of their labels.
        keys: the keys of the records written so far.
        labels: the labels of the records written so far.
        skipped: the number of files that aren't images.
        beside: names of images that are in no class folder, which are left out.
        link_cycles: links that weren't followed, because they lead to a folder above them.
        damaged: for each image or record that was left out because it can't be read, its name and
            its defect.
        reduced: counts the images that lose transparency or bits.
    """

    writer: Writer
    format: RecordFormat
    classes: tuple[str, ...]
    keys: list[bytes]
    labels: list[int] = field(default_factory=list)
    skipped: int = 0
    beside: list[str] = field(default_factory=list)
    link_cycles: tuple[str, ...] = ()
    damaged: list[str] = field(default_factory=list)
    reduced: ReducedImages = field(default_factory=ReducedImages)

    def put(self, key: bytes, value: bytes, label: int) -> None:
        """Append a record; its key must sort after all that came before."""
        self.writer.put(key, value)
        self.keys.append(key)
        self.labels.append(label)


@contextmanager
def new_database(
    dest: Path,
    db_type: DbType,
    *,
    record_format: RecordFormat,
    label_names: Sequence[str] | None,
) -> Iterator[NewDatabase]:
    """Yield a database to fill; it is at `dest` once the block has ended without an error.

    Raises:
        ConfigError: there is something at `dest` already, or another process is writing it.
        DataError: the disk is full, or the place can't be written.
    """
    check_destination(dest)
    keys: list[bytes] = []
    try:
        with staged(dest) as folder:
            with closing(WRITERS[db_type](folder)) as writer:
                classes = tuple(label_names or ())
                database = NewDatabase(
                    writer=writer, format=record_format, classes=classes, keys=keys
                )
                yield database
                writer.finish()
            write_index(
                folder,
                keys=keys,
                labels=database.labels,
                label_names=label_names,
                record_format=record_format,
                offsets=writer.offsets,
            )
    except WRITE_ERRORS as error:
        reason = f"stopped after {len(keys):,} records and nothing was left there"
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if full or os.strerror(errno.ENOSPC) in str(error):  # LMDB and LevelDB only say it
            raise DataError(
                f"{dest}: the disk is full; {reason}. Free space or choose another disk."
            ) from error
        said = getattr(error, "strerror", None) or error
        raise DataError(
            f"{dest} can't be written ({said}); {reason}. Choose a folder that this user may write "
            "to."
        ) from error
