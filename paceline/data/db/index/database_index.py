"""The index of a database: what makes opening it quick, in one file beside the data.

Listing a million keys costs a walk over the whole database; the index holds the list, and what is
known about labels and format. It is written whole or not at all (a temporary file, then a rename)
and carries a *stamp* of the database's files, which survives a copy but no change. A stamp that
doesn't fit means that there is no index. Whoever reads records checks them against the index's
keys and labels besides (`paceline.data.db.indexed_source`), so a wrong one never counts silently.

    FOLDER/paceline.index       see `paceline.data.db.index.index_file`
    FOLDER/labels.txt           the classes' names for people, one a line, label 0 first
    FILE.paceline.index …       the same of a database that is one file
    CACHE_DIR/NAME-HASH.index   the index of a folder that can't be written

Keys stand in the order of their bytes, the order in which databases list them: a record has
the same number whether its index was written with the data or made later.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from paceline.atomic_write import write_atomically
from paceline.config.db import RecordFormat
from paceline.data.db.database_files import beside, stamp
from paceline.data.db.index.index_file import Index, pack, read_index
from paceline.data.db.index.key_list import KeyList
from paceline.errors import ConfigError, DataError

INDEX_NAME = "paceline.index"  # a name that no database takes for its own
LABELS_NAME = "labels.txt"


def write_index(
    folder: Path,
    *,
    keys: Sequence[bytes],
    labels: Sequence[int],
    label_names: Sequence[str] | None,
    record_format: RecordFormat,
    offsets: Sequence[int] | None = None,
) -> None:
    """Write index and label names beside a database that has just been written and closed.

    Args:
        folder: the database.
        keys: every record's key, in any order.
        labels: the records' classes, in the order of `keys`.
        label_names: the classes' names, label 0 first.
        offsets: where each record begins, in the order of `keys`; a minidb needs them.

    Raises:
        ConfigError: a label's name has a line break.
        DataError: the folder can't be written.
    """
    assert len(keys) == len(labels) == len(set(keys)), "each key once, and a label for each"
    order = sorted(range(len(keys)), key=keys.__getitem__)
    index = Index(
        keys=KeyList.of(keys[i] for i in order),
        offsets=None if offsets is None else np.asarray(offsets, dtype=np.int64)[order],
        labels=np.asarray(labels, dtype=np.int64)[order],
        label_names=None if label_names is None else tuple(label_names),
        format=record_format,
    )
    for name in index.label_names or ():
        if "\n" in name or "\r" in name:
            raise ConfigError(f"The label name {name!r} has a line break; give it another name.")
    try:
        if index.label_names is not None:
            write_label_names(beside(folder, LABELS_NAME), index.label_names)
        write_atomically(beside(folder, INDEX_NAME), pack(index, stamp(folder)))
    except OSError as error:
        raise DataError(f"{folder}: its index can't be written ({error.strerror}).") from error


def save_index(folder: Path, index: Index, *, cache_dir: Path | None) -> str | None:
    """Save an index beside its database or, where that can't be written, under `cache_dir`.

    Returns:
        None, or why it could be written in neither place, in words.
    """
    content = pack(index, stamp(folder))
    reasons = []
    for path in _places(folder, cache_dir):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
        except OSError as error:
            reasons.append(f"{path.parent}: {error.strerror}")
        else:
            return None
    remedy = "make one of these folders writable" if cache_dir else "give a writable --cache_dir"
    return (
        f"The index can't be saved ({'; '.join(reasons)}), so every start lists all "
        f"{len(index.keys)} keys again; {remedy}."
    )


def load_index(folder: Path, *, cache_dir: Path | None) -> Index | None:
    """Load the index that fits the database as it is now, from either place; None without one."""
    current = stamp(folder)
    indexes = (read_index(path, current) for path in _places(folder, cache_dir))
    return next((index for index in indexes if index is not None), None)


def write_label_names(path: Path, names: Iterable[str]) -> None:
    """Write label names, one a line, label 0 first.

    Raises:
        OSError: the file can't be written.
    """
    lines = "".join(f"{name}\n" for name in names)
    write_atomically(path, lines.encode("utf-8", "surrogateescape"))


def read_label_names(folder: Path) -> tuple[str, ...] | None:
    """Read the label names beside a database, where it has any."""
    path = beside(folder, LABELS_NAME)
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8-sig", errors="surrogateescape").rstrip("\n")
    return tuple(text.split("\n")) if text else None


def _places(folder: Path, cache_dir: Path | None) -> list[Path]:
    places = [beside(folder, INDEX_NAME)]
    if cache_dir is not None:
        resolved = folder.resolve()
        digest = hashlib.sha256(os.fsencode(resolved)).hexdigest()[:16]
        places.append(cache_dir / f"{resolved.name}-{digest}.index")
    return places
