"""Make a database of a folder of images.

    scan → shuffle → read, check, encode (processes) → number, write → index → rename
                     in bounded memory                 in order

The result is a function of the files and the settings alone, not of the number of processes. Keys
are those of Caffe's convert_imageset, `%08d_<path>`, numbered in the order of writing, so that a
reader from the first to the last key meets the shuffled order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from paceline.config.db import DbCreateConfig
from paceline.data.db.class_folders import Candidate, scan, shuffled
from paceline.data.db.formats.record_formats import encode_record
from paceline.data.db.write.new_database import NewDatabase, new_database
from paceline.data.db.write.staged_folder import check_destination
from paceline.data.db.write.writers import LONGEST_KEY
from paceline.data.image.formats import DamagedImage
from paceline.data.image.image_file import is_image, stored_form
from paceline.data.ordered_map import Meter, ordered_map
from paceline.errors import ConfigError, DataError


def create_database(config: DbCreateConfig, meter: Meter) -> NewDatabase:
    """Write the images of `config.folder` to a new database at `config.dest`.

    Raises:
        ConfigError: there is nothing to read, or something at the destination already.
        DataError: an image is damaged or can't be read, or the disk is full.
    """
    if not config.folder.is_dir():
        raise ConfigError(
            f"{config.folder} isn't a folder: give a folder that contains class folders."
        )
    if config.dest.resolve().is_relative_to(config.folder.resolve()):
        raise ConfigError(
            f"{config.dest} is inside {config.folder}, whose subfolders are classes: choose a "
            "folder outside of it."
        )
    check_destination(config.dest)
    found = scan(config.folder)
    with new_database(
        config.dest, config.db_type, record_format=config.format, label_names=found.classes
    ) as database:
        database.skipped = found.skipped
        _write_records(config, found.candidates, database, meter)
    return database


def _write_records(
    config: DbCreateConfig,
    candidates: Sequence[Candidate],
    database: NewDatabase,
    meter: Meter,
) -> None:
    if config.shuffle_seed is not None:
        candidates = shuffled(candidates, config.shuffle_seed)
    width = max(8, len(str(len(candidates))))  # keys of any number sort as numbers
    make = partial(_stored, config)
    with closing(ordered_map(make, candidates, workers=config.workers, meter=meter)) as results:
        for candidate, stored in zip(candidates, results, strict=True):
            if isinstance(stored, tuple):
                key = b"%0*d_%s" % (width, len(database.keys), os.fsencode(candidate.name))
                value, was_transparent = stored
                database.put(key[:LONGEST_KEY], value, candidate.label)
                database.transparent += was_transparent
            elif stored is None:
                database.skipped += 1
            elif config.skip_damaged:
                database.damaged.append(candidate.name)
            else:
                raise stored
    if not database.keys:
        raise ConfigError(
            f"{config.folder} holds no images in its {len(database.classes)} class folders: put "
            "JPEG, PNG or other image files there."
        )


def _stored(config: DbCreateConfig, candidate: Candidate) -> tuple[bytes, bool] | DataError | None:
    """Read a file and make its record.

    Returns:
        The record and whether the image was transparent; None if the file isn't an image; an error
        if it is damaged.
    """
    path = config.folder / candidate.name
    try:
        data = path.read_bytes()
    except OSError as error:
        return DataError(f"{path} can't be read: {error.strerror}.")
    if not is_image(data, candidate.name):
        return None
    try:
        image, was_transparent = stored_form(data, config.encoding, config.resize)
    except DamagedImage as error:
        return DataError(
            f"{path} is a damaged image: {error}. Repair or remove it, or give --skip_damaged."
        )
    return encode_record(image, candidate.label, config.format), was_transparent
