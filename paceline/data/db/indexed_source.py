"""Records by number over any database of keys and values: what the databases have in common.

    open    an index that fits?  yes → its keys      no → list all keys, save the index
    read    number → key → value → record            whatever disagrees with the index is an error

An index is believed only as far as it was checked: at open its stamp and some sampled records; and
every record when it is read, for its label. So the worst that an index of another database can do
is an error that names it.

A damaged record, even the first, does not prevent opening: reading it is an error. A database opens
unless all of the sampled records are damaged, and most of them decide the format of all.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.config.db import RecordFormat
from paceline.data import splitmix
from paceline.data.db.database_files import beside, identity
from paceline.data.db.formats.record_formats import UnfitRecord, decode_record, printable
from paceline.data.db.index.database_index import (
    INDEX_NAME,
    load_index,
    read_label_names,
    save_index,
)
from paceline.data.db.index.index_file import Index
from paceline.data.source import Record, SourceLost
from paceline.errors import DataError, PacelineError

_FINGERPRINT = 6  # a purpose beside those of the order and of made-up images
_FINGERPRINTED = 64  # records of the fingerprint, drawn at random besides those that are sampled
_SAMPLED = 16  # records that are read at open: a few milliseconds, also from a disk that turns


class Database(Protocol):
    """Protocol of a key-value database under an `IndexedSource`; `read` is thread-safe."""

    def read(self, key: bytes, offset: int | None) -> bytes | None:
        """Read a value; None where there is no such key.

        Args:
            key: the record's.
            offset: where the record begins, from a listing with offsets.

        Raises:
            DataError: the database is damaged there.
        """

    def listing(self) -> Index:
        """List all keys in the order of their bytes, with offsets if reading needs them.

        Raises:
            DataError: the database is damaged.
        """

    def close(self) -> None:
        """Release the database."""


class FoundDatabase(Protocol):
    """Protocol of a database that was found and can be opened, also by a pickled source."""

    @property
    def path(self) -> Path:
        """The database's folder, which also holds its index and label names; a minidb's file."""

    @property
    def cache_dir(self) -> Path | None:
        """Folder of the index if the database's folder can't be written, or None."""

    def open(self) -> Database:
        """Open the database.

        Raises:
            ConfigError: it can't be opened.
            DataError: it is damaged.
        """


class IndexedSource:
    """Source over a database with an index; it owns the database and closes it.

    A pickled source has its index with it, and opens the database anew at its first read: a
    database that is open can't pass from one process to another. It must be the same one, for
    another one's records would be mixed with those that were read before.

    Args:
        found: the database. It is closed even if the constructor fails.

    Attributes:
        labels: int64 of shape (records,), the records' labels; None if the index doesn't hold them.
        label_names: the classes' names, from labels.txt or else from the index; None if unknown.
        format: the format of all records.
        fingerprint: digest of the number of records and of a seeded sample of their keys, images
            and labels.
        index_note: a sentence that says why the index couldn't be saved; None if it could.

    Raises:
        DataError: the database is damaged or empty, or its records are of no known format.
    """

    def __init__(self, found: FoundDatabase) -> None:
        self._found = found
        self._folder = found.path
        self._identity = identity(self._folder)
        self._open: Database | None = found.open()
        self.index_note: str | None = None
        try:
            saved = load_index(self._folder, cache_dir=found.cache_dir)
            if saved is not None:
                self._index = saved
            if saved is None or not all(map(self._agrees, self._sample())):
                self._make_index()
            self.labels = self._index.labels
            self.label_names = read_label_names(self._folder) or self._index.label_names
            self.format = self._index.format or self._common_format()
            self.fingerprint = self._digest()
        except BaseException:
            self.close()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}

    def __len__(self) -> int:
        return len(self._index.keys)

    def __getitem__(self, index: int) -> Record:
        record, _ = self._parsed(index, self.format)
        if self.labels is not None and record.label != self.labels[index]:
            raise DataError(
                f"{self.name(index)} has label {record.label}, but label {self.labels[index]} in "
                f"the index: the index belongs to another database; {self._remedy()}."
            )
        return record

    def stored(self, index: int) -> tuple[bytes, bytes]:
        """Read a record's key and value as they are in the database.

        Raises:
            DataError: the database is damaged there.
        """
        return self._index.keys[index], self._value(index)

    def name(self, index: int) -> str:
        """Name a record by its key and the database's folder."""
        return f"record {printable(self._index.keys[index])} of {self._folder}"

    def close(self) -> None:
        """Release the database; no record may be read any more."""
        if self._open is not None:
            self._open.close()

    @property
    def _database(self) -> Database:
        if self._open is None:
            self._open = self._opened_again()
        return self._open

    def _opened_again(self) -> Database:
        """Open the database of this source in another process.

        Raises:
            SourceLost: it is another one, or can't be opened.
        """
        again = "put it back, and start the same command again to resume."
        try:
            database = self._found.open()
            found = identity(self._folder)
        except (OSError, PacelineError) as error:
            raise SourceLost(f"{self._folder} can't be opened again ({error}): {again}") from error
        if found != self._identity:
            database.close()
            raise SourceLost(
                f"{self._folder} was changed or replaced since it was opened, and isn't read on: "
                f"{again}"
            )
        return database

    def _agrees(self, i: int) -> bool:
        """Return whether a record agrees with the saved index."""
        try:
            value = self._read(i)
            if value is None:
                return False
            record, found = decode_record(value)
        except (DataError, UnfitRecord):
            return True  # damage says nothing about the index; reading the record raises an error
        known_label = record.label if self._index.labels is None else self._index.labels[i]
        return self._index.format in (None, found) and record.label == known_label

    def _make_index(self) -> None:
        """List the keys, and save them for the next open."""
        self._index = self._database.listing()
        if not self._index.keys:
            raise DataError(f"{self._folder} holds no records; create it again.")
        self._index = replace(
            self._index,
            label_names=read_label_names(self._folder),
            format=self._common_format(),
        )
        self.index_note = save_index(self._folder, self._index, cache_dir=self._found.cache_dir)

    def _common_format(self) -> RecordFormat:
        """Find the format that most of the sampled records have."""
        found: Counter[RecordFormat] = Counter()
        damage = []
        for i in self._sample():
            try:
                found[self._parsed(i, None)[1]] += 1
            except DataError as error:
                damage.append(error)
        if not found:
            raise damage[0]
        return found.most_common(1)[0][0]

    def _parsed(self, i: int, expected: RecordFormat | None) -> tuple[Record, RecordFormat]:
        value = self._value(i)
        try:
            return decode_record(value, expected)
        except UnfitRecord as error:
            raise DataError(f"{self.name(i)}: {error}") from error

    def _value(self, i: int) -> bytes:
        value = self._read(i)
        if value is None:
            raise DataError(
                f"{self.name(i)} is in the index but not in the database: the index "
                f"belongs to another database; {self._remedy()}."
            )
        return value

    def _read(self, i: int) -> bytes | None:
        offsets = self._index.offsets
        return self._database.read(
            self._index.keys[i], None if offsets is None else int(offsets[i])
        )

    def _remedy(self) -> str:
        return f"delete {beside(self._folder, INDEX_NAME)} (and its copy in --cache_dir, if any)"

    def _digest(self) -> str:
        keys = self._index.keys
        digest = hashlib.sha256(str(len(keys)).encode())
        drawn = splitmix.stream(splitmix.base(_FINGERPRINT), _FINGERPRINTED) % len(keys)
        for i in sorted({*drawn.tolist(), *self._sample()}):
            digest.update(hashlib.sha256(keys[i]).digest())
            with suppress(DataError):  # a damaged record has no content; reading it is an error
                record, _ = self._parsed(i, None)
                digest.update(hashlib.sha256(bytes(record.image)).digest())
                digest.update(record.label.to_bytes(8, "little"))
        return digest.hexdigest()

    def _sample(self) -> list[int]:
        """Choose up to `_SAMPLED` records, evenly, first and last among them."""
        count = len(self)
        return sorted({int(i) for i in np.linspace(0, count - 1, min(count, _SAMPLED))})
