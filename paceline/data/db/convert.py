"""Make a database of another one: of another kind, in another format, or encoded anew.

    source → read, check, encode (processes) → write → index → rename
             in bounded memory               in order

Keys, their order, labels and the labels' names stay. An unchanged value is copied byte for byte;
its image is checked nevertheless, so that the result holds no damaged image.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial

from paceline.config.db import DbConvertConfig, DbType, RecordFormat
from paceline.data.db.formats.record_formats import encode_record, printable
from paceline.data.db.indexed_source import IndexedSource
from paceline.data.db.open_database import open_database
from paceline.data.db.write.new_database import NewDatabase, new_database
from paceline.data.db.write.staged_folder import check_destination
from paceline.data.db.write.writers import LONGEST_KEY
from paceline.data.image.image_errors import DamagedImage
from paceline.data.image.image_file import StoredForm, check_image, stored_form
from paceline.data.ordered_map import Meter, ordered_map
from paceline.errors import ConfigError, DataError

_LONGEST: dict[DbType, int] = {  # bytes of a key
    "lmdb": LONGEST_KEY,
    "leveldb": 2**31 - 1,
    "minidb": 2**31 - 1,
}


def convert_database(config: DbConvertConfig, meter: Meter) -> NewDatabase:
    """Write the records of `config.source` to a new database at `config.dest`.

    Raises:
        ConfigError: there is no source, something at the destination already, or a key that the new
            database can't have.
        DataError: a record is damaged, or the disk is full.
    """
    check_destination(config.dest)
    folder = config.source.resolve()
    if folder.is_dir() and config.dest.resolve().is_relative_to(folder):
        raise ConfigError(
            f"{config.dest} is inside {config.source}, which is being read: choose a folder "
            "outside of it."
        )
    with (
        closing(open_database(config.source, cache_dir=config.cache_dir)) as source,
        new_database(
            config.dest,
            config.db_type,
            record_format=config.format or source.format,
            label_names=source.label_names,
        ) as database,
    ):
        database.reduced.value_range = config.value_range
        _write_records(config, source, database, meter)
    return database


def _write_records(
    config: DbConvertConfig, source: IndexedSource, database: NewDatabase, meter: Meter
) -> None:
    """Write all records but damaged ones, and report what is wrong with those."""
    make = partial(_made, config, source, database.format)
    with closing(
        ordered_map(make, range(len(source)), noun="record", workers=config.workers, meter=meter)
    ) as results:
        for made in results:
            if isinstance(made, tuple):
                key, value, label, form = made
                if database.keys and key == database.keys[-1]:
                    raise ConfigError(
                        f"{config.source} has two records with the key {printable(key)}, but an "
                        "index identifies records by key: create the database again with unique "
                        "keys."
                    )
                longest = _LONGEST[config.db_type]
                if not 1 <= len(key) <= longest:
                    raise ConfigError(
                        f"{config.source} has the key {printable(key)} of {len(key)} bytes, but "
                        f"keys of {config.db_type} must have 1 to {longest} bytes: choose another "
                        "--db_type."
                    )
                database.put(key, value, label)
                database.reduced.add(form)
            elif config.skip_damaged:
                database.damaged.append(str(made))
            else:
                raise DataError(
                    f"{made} Use --skip_damaged to leave out damaged records."
                ) from made
    if not database.keys:
        raise DataError(f"{config.source}: all of its records are damaged; create it again.")
    _require_all_labels(config, source, database)
    database.reduced.require_contrast(config.source)


def _require_all_labels(
    config: DbConvertConfig, source: IndexedSource, database: NewDatabase
) -> None:
    """Refuse a database without any record of a label that the source has."""
    lost = set() if source.labels is None else set(source.labels.tolist()) - set(database.labels)
    if not lost:
        return
    label = min(lost)
    names = dict(enumerate(source.label_names or ()))
    named = f" ({names[label]})" if label in names else ""
    raise DataError(
        f"{config.source}: all records of label {label}{named} are damaged, so that the new "
        f"database would have none; the first damaged record: {database.damaged[0]} Create the "
        "database again."
    )


def _made(
    config: DbConvertConfig, source: IndexedSource, record_format: RecordFormat, number: int
) -> tuple[bytes, bytes, int, StoredForm] | DataError:
    """Read a record and make the new one.

    Returns:
        Its key, value, label and image; or what is wrong with it.
    """
    try:
        record = source[number]
        key, value = source.stored(number)
        if config.encoding == "keep":
            check_image(record.image)
            form = StoredForm(record.image)
        else:
            form = stored_form(record.image, config.encoding, value_range=config.value_range)
    except DamagedImage as error:
        return DataError(error.sentence(source.name(number)))
    except DataError as error:
        return error
    if form.image is not record.image or record_format != source.format:
        value = encode_record(form.image, record.label, record_format)
    return key, value, record.label, form
