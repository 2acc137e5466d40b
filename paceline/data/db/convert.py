"""Make a database of another one: of another kind, in another format, or encoded anew.

    source → read, check, encode (threads) → write → index → rename
             in bounded memory               in order

Keys, their order, labels and the labels' names are kept. A value that is to stay as it is is copied
byte for byte; its image is looked through nevertheless, so that a conversion's result is sound.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.config.db import DbConvertConfig, DbType, RecordFormat
from paceline.data.db.formats.record_formats import encode_record, printable
from paceline.data.db.indexed_source import IndexedSource
from paceline.data.db.open_database import opened
from paceline.data.db.write.new_database import NewDatabase, new_database
from paceline.data.db.write.staged_folder import check_destination
from paceline.data.db.write.writers import LONGEST_KEY
from paceline.data.image.image_file import DamagedImage, check_image, stored_form
from paceline.data.ordered_map import Meter, ordered_map
from paceline.errors import ConfigError, DataError

_LONGEST: dict[DbType, int] = {  # bytes of a key
    "lmdb": LONGEST_KEY,
    "leveldb": 2**31 - 1,
    "minidb": 2**31 - 1,
}


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was written.

    Attributes:
        records: in the new database.
        format: of the new records.
        damaged: what is wrong with each record that was left out; names its key.
    """

    records: int
    format: RecordFormat
    damaged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Made:
    """A record on its way."""

    key: bytes
    value: bytes
    label: int


def convert_database(config: DbConvertConfig, meter: Meter) -> Converted:
    """Write the records of `config.source` to a new database at `config.dest`.

    Raises:
        ConfigError: there is no source, something at the destination already, or a key that the new
            database can't have.
        DataError: a record is damaged, or the disk is full.
    """
    _check_places(config.source, config.dest)
    with opened(config.source, config.cache_dir) as source:
        record_format = config.format or source.format
        with new_database(
            config.dest,
            config.db_type,
            record_format=record_format,
            label_names=source.label_names,
        ) as database:
            damaged = _write_records(config, source, record_format, database, meter)
        return Converted(records=len(database.keys), format=record_format, damaged=tuple(damaged))


def _check_places(source: Path, dest: Path) -> None:
    check_destination(dest)
    if source.is_dir() and dest.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{dest} lies in {source}, which is read: choose a place outside.")


def _write_records(
    config: DbConvertConfig,
    source: IndexedSource,
    record_format: RecordFormat,
    database: NewDatabase,
    meter: Meter,
) -> list[str]:
    """Write all records but damaged ones; return what is wrong with those."""
    damaged = []
    make = partial(_made, config, source, record_format)
    with closing(
        ordered_map(make, range(len(source)), workers=config.workers, meter=meter)
    ) as results:
        for made in results:
            if isinstance(made, _Made):
                _check_key(config, made.key, database.keys)
                database.put(made.key, made.value, made.label)
            elif config.skip_damaged:
                damaged.append(str(made))
            else:
                raise DataError(f"{made} Leave damaged records out by --skip_damaged.") from made
    if not database.keys:
        raise DataError(f"{config.source}: all of its records are damaged; write it again.")
    return damaged


def _made(
    config: DbConvertConfig, source: IndexedSource, record_format: RecordFormat, number: int
) -> _Made | DataError:
    """Read a record and make the new one, or tell what is wrong with it."""
    try:
        record = source[number]
        key, value = source.stored(number)
        if config.encoding == "keep":
            check_image(record.image)
            image = record.image
        else:
            image = stored_form(record.image, config.encoding)
    except DamagedImage as error:
        return DataError(f"{source.name(number)} has a damaged image: {error}.")
    except DataError as error:
        return error
    if image is not record.image or record_format != source.format:
        value = encode_record(image, record.label, record_format)
    return _Made(key, value, record.label)


def _check_key(config: DbConvertConfig, key: bytes, before: list[bytes]) -> None:
    if before and key == before[-1]:
        raise ConfigError(
            f"{config.source} has two records with the key {printable(key)}, and an index names "
            "each record by its key: write it again with keys that are all different."
        )
    longest = _LONGEST[config.db_type]
    if not 1 <= len(key) <= longest:
        raise ConfigError(
            f"{config.source} has the key {printable(key)} of {len(key)} bytes, and keys of "
            f"{config.db_type} have 1 to {longest}: choose another --db_type."
        )
