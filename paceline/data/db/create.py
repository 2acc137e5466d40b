"""Make a database of a folder of images.

    scan → shuffle → read, check, encode (processes) → number, write → index → rename
                     in bounded memory                 in order

The result is a function of the files and the settings alone, not of the number of processes. Keys
are those of Caffe's convert_imageset, `%08d_<path>`, numbered in the order of writing, so that a
reader from the first to the last key meets the shuffled order.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from paceline.config.db import DbCreateConfig
from paceline.data.db.class_folders import Candidate, scan, shuffled
from paceline.data.db.formats.record_formats import encode_record
from paceline.data.db.write.new_database import NewDatabase, new_database
from paceline.data.db.write.staged_folder import check_destination
from paceline.data.db.write.writers import LONGEST_KEY
from paceline.data.image.image_errors import DamagedImage
from paceline.data.image.image_file import (
    StoredForm,
    check_readable,
    is_image,
    named_as_image,
    stored_form,
)
from paceline.data.ordered_map import Meter, ordered_map
from paceline.errors import ConfigError, DataError, many


def create_database(config: DbCreateConfig, meter: Meter) -> NewDatabase:
    """Write the images of `config.folder` to a new database at `config.dest`.

    Raises:
        ConfigError: there is nothing to read, or something at the destination already.
        DataError: an image is damaged or can't be read, no file of a class can, or the disk is
            full.
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
        database.beside = [name for name in found.beside if named_as_image(name)]
        database.skipped = found.skipped + len(found.beside) - len(database.beside)
        database.link_cycles = found.link_cycles
        database.reduced.value_range = config.value_range
        _write_records(config, found.candidates, database, meter)
    return database


@dataclass(frozen=True, slots=True)
class _Unread:
    """Image file that can't be read: why, as a clause, and an error's sentence about it."""

    reason: str
    sentence: str


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
    with closing(
        ordered_map(make, candidates, noun="image", workers=config.workers, meter=meter)
    ) as results:
        for candidate, stored in zip(candidates, results, strict=True):
            if stored is None:
                database.skipped += 1
            elif isinstance(stored, _Unread):
                if not config.skip_damaged:
                    raise DataError(stored.sentence)
                database.damaged.append(f"{candidate.name}: {stored.reason}")
            else:
                key = b"%0*d_%s" % (width, len(database.keys), os.fsencode(candidate.name))
                value, form = stored
                database.put(key[:LONGEST_KEY], value, candidate.label)
                database.reduced.add(form)
    _require_all_classes(config, candidates, database)
    database.reduced.require_contrast(config.folder)
    if not database.keys:
        raise ConfigError(
            f"{config.folder} holds no images in its {len(database.classes)} class folders: put "
            "JPEG, PNG or other image files there."
        )


def _require_all_classes(
    config: DbCreateConfig, candidates: Sequence[Candidate], database: NewDatabase
) -> None:
    """Refuse a database in which a class that has files has no record."""
    files = Counter(candidate.label for candidate in candidates)
    lost = sorted(files.keys() - set(database.labels))
    if not lost:
        return
    name = database.classes[lost[0]]
    unread = [line for line in database.damaged if line.startswith(f"{name}/")]
    reason = f"the first: {unread[0]}" if unread else "none is an image"
    count = files[lost[0]]
    can = "its only file can't" if count == 1 else f"none of its {count:,} files can"
    others = f", and {many(len(lost) - 1, 'other class')} likewise" if len(lost) > 1 else ""
    raise DataError(
        f"{config.folder / name}: the class would have no record, because {can} be read as "
        f"an image ({reason}){others}. Repair the files, or move what is no class out of the "
        "folder."
    )


def _stored(
    config: DbCreateConfig, candidate: Candidate
) -> tuple[bytes, StoredForm] | _Unread | None:
    """Read a file and make its record.

    Returns:
        The record and its image; None if the file isn't an image.
    """
    path = config.folder / candidate.name
    try:
        data = path.read_bytes()
    except OSError as error:
        if path.is_symlink() and not path.exists() and not named_as_image(candidate.name):
            return None
        linked = f" (a link to {os.readlink(path)})" if path.is_symlink() else ""
        reason = f"can't be read: {error.strerror}{linked}"
        return _Unread(reason, f"{path} {reason}. Repair or remove it, or give --skip_damaged.")
    if not is_image(data, candidate.name):
        return None
    try:
        check_readable(data, candidate.name)
        form = stored_form(data, config.encoding, config.resize, config.value_range)
    except DamagedImage as error:
        sentence = error.sentence(
            f"{path}", state="is a damaged image", otherwise=", or give --skip_damaged"
        )
        return _Unread(f"{error}", sentence)
    return encode_record(form.image, candidate.label, config.format), form
