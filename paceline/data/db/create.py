"""Make a database of a folder of images.

    scan → shuffle → read, check, encode (threads) → number, write → index → rename
                     in bounded memory               in order

The result is a function of the files and the settings alone, not of the number of threads. Keys
are those of Caffe's convert_imageset, `%08d_<path>`, numbered in the order of writing, so that a
reader from the first to the last key meets the shuffled order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from paceline.config.db import DbCreateConfig
from paceline.data.db.class_folders import Candidate, ClassFolders, scan, shuffled
from paceline.data.db.formats.record_formats import encode_record
from paceline.data.db.write.new_database import NewDatabase, new_database
from paceline.data.db.write.staged_folder import check_destination
from paceline.data.db.write.writers import LONGEST_KEY
from paceline.data.image.image_file import DamagedImage, is_image, stored_form
from paceline.data.ordered_map import Meter, ordered_map
from paceline.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Created:
    """What was written.

    Attributes:
        records: images in the database.
        classes: the labels' names.
        empty_classes: those without an image.
        skipped: files that aren't images.
        damaged: names of images left out because they are damaged.
    """

    records: int
    classes: tuple[str, ...]
    empty_classes: tuple[str, ...]
    skipped: int
    damaged: tuple[str, ...]


def create_database(config: DbCreateConfig, meter: Meter) -> Created:
    """Write the images of `config.folder` to a new database at `config.dest`.

    Raises:
        ConfigError: there is nothing to read, or something at the destination already.
        DataError: an image is damaged or can't be read, or the disk is full.
    """
    _check_places(config.folder, config.dest)
    found = scan(config.folder)
    log = _Log(skipped=found.skipped)
    with new_database(
        config.dest, config.db_type, record_format=config.format, label_names=found.classes
    ) as database:
        _write_records(config, found, database, log, meter)
    used = set(database.labels)
    return Created(
        records=len(database.keys),
        classes=found.classes,
        empty_classes=tuple(n for i, n in enumerate(found.classes) if i not in used),
        skipped=log.skipped,
        damaged=tuple(log.damaged),
    )


@dataclass
class _Log:
    """What has become of the candidates that aren't records."""

    skipped: int
    damaged: list[str] = field(default_factory=list)


def _check_places(folder: Path, dest: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder} isn't a folder: give a folder of class folders.")
    if dest.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"{dest} lies in {folder}, whose subfolders are classes: choose a place outside."
        )
    check_destination(dest)


def _write_records(
    config: DbCreateConfig, found: ClassFolders, database: NewDatabase, log: _Log, meter: Meter
) -> None:
    candidates: Sequence[Candidate] = found.candidates
    if config.shuffle_seed is not None:
        candidates = shuffled(candidates, config.shuffle_seed)
    width = max(8, len(str(len(candidates))))  # keys of any number sort as numbers
    make = partial(_value, config)
    with closing(ordered_map(make, candidates, workers=config.workers, meter=meter)) as values:
        for candidate, value in zip(candidates, values, strict=True):
            if isinstance(value, bytes):
                key = b"%0*d_%s" % (width, len(database.keys), os.fsencode(candidate.name))
                database.put(key[:LONGEST_KEY], value, candidate.label)
            elif value is None:
                log.skipped += 1
            elif config.skip_damaged:
                log.damaged.append(candidate.name)
            else:
                raise value
    if not database.keys:
        raise ConfigError(
            f"{found.folder} holds no images in its {len(found.classes)} class folders: put JPEG, "
            "PNG or other image files there."
        )


def _value(config: DbCreateConfig, candidate: Candidate) -> bytes | DataError | None:
    """Read a file and make its record; None if it isn't an image, an error if it is damaged."""
    path = config.folder / candidate.name
    try:
        data = path.read_bytes()
    except OSError as error:
        return DataError(f"{path} can't be read: {error.strerror}.")
    if not is_image(data, candidate.name):
        return None
    try:
        image = stored_form(data, config.encoding, config.resize)
    except DamagedImage as error:
        return DataError(
            f"{path} is a damaged image: {error}. Mend or remove it, or give --skip_damaged."
        )
    return encode_record(image, candidate.label, config.format)
