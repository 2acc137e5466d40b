"""A folder of class folders: which classes there are and which files could be their images.

    FOLDER/cat/1.jpg            label 0, "cat"
    FOLDER/cat/2019/7.png       label 0
    FOLDER/dog/1.jpg            label 1, "dog"

A class's label is its position among the sorted names of the subfolders. Names that begin with a
dot are neither classes nor images (`.ipynb_checkpoints`, `._photo.jpg`). A folder of `train/` and
`test/` with the same classes inside is not a folder of two classes, and is refused, whatever else
is there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, DataError

PARTS = {  # the usual names of a data set's parts
    *("train", "training", "val", "valid", "validation", "dev", "eval", "evaluation"),
    *("test", "testing", "holdout"),
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """File that may be an image; `name` is its path relative to the parent of the class folders."""

    name: str
    label: int


@dataclass(frozen=True, kw_only=True)
class ClassFolders:
    """Class folders in label order, with their files in sorted order, and the skipped entries.

    Attributes:
        skipped: entries that are left out: files next to the class folders, hidden entries, and
            entries that are neither files nor folders.
    """

    folder: Path
    classes: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    skipped: int


def scan(folder: Path) -> ClassFolders:
    """List the classes of `folder` and their files, at any depth.

    A class folder may be a link, and so may an image; links to folders below a class are skipped,
    because they can lead in a circle.

    Raises:
        ConfigError: there is no class folder, the folders are the parts of a data set, or a class's
            name can't be a line of a text file.
        DataError: a folder can't be listed.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
        classes = [n for n in names if (folder / n).is_dir() and not n.startswith(".")]
        if not classes:
            raise ConfigError(
                f"{folder} has no subfolders: put the images of each class in {folder}/<class>."
            )
        candidates: list[Candidate] = []
        skipped = len(names) - len(classes)
        for label, name in enumerate(classes):
            if len(name.splitlines()) > 1 or any("\ud800" <= c <= "\udfff" for c in name):
                raise ConfigError(
                    f"{str(folder / name)!r}: the name of a class must be UTF-8 without line "
                    "breaks; rename the folder."
                )
            for path in _walk(folder / name, name):
                if path is None:
                    skipped += 1
                else:
                    candidates.append(Candidate(path, label))
        found = ClassFolders(
            folder=folder, classes=tuple(classes), candidates=tuple(candidates), skipped=skipped
        )
    except OSError as error:
        raise DataError(f"{error.filename} can't be listed: {error.strerror}.") from error
    _refuse_parts(found)
    return found


def shuffled(candidates: Sequence[Candidate], seed: int) -> list[Candidate]:
    """Order candidates by a hash of seed and name.

    The order is the same on every machine and for every version of Python, and taking a file away
    leaves that of the others as it was.
    """
    return sorted(
        candidates, key=lambda c: hashlib.sha256(os.fsencode(f"{seed}/{c.name}")).digest()
    )


def _walk(folder: Path, name: str) -> Iterator[str | None]:
    """Yield names of files below `folder`, beginning with `name`, sorted; None for skipped ones."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.name.startswith("."):
                yield None
            elif entry.is_dir(follow_symlinks=False):
                yield from _walk(folder / entry.name, f"{name}/{entry.name}")
            else:
                yield f"{name}/{entry.name}" if entry.is_file() else None


def _refuse_parts(found: ClassFolders) -> None:
    """Refuse folders named as parts of a data set, if one is empty or names in them recur."""
    parts: dict[str, set[str]] = {name: set() for name in found.classes if name.lower() in PARTS}
    empty = set(parts)
    for candidate in found.candidates:
        name, *subfolders, _ = candidate.name.split("/")
        if name in parts:
            empty.discard(name)
            parts[name].update(subfolders[:1])
    with_folders = [name for name, subfolders in parts.items() if subfolders]
    recurring = len(set().union(*parts.values())) < sum(map(len, parts.values()))
    if recurring or (empty and with_folders):
        folders = " and ".join(f"{name}/" for name in with_folders)
        first = next((n for n in with_folders if n.lower().startswith("train")), with_folders[0])
        raise ConfigError(
            f"{found.folder} has {folders}, {'each of ' if recurring else ''}which contains class "
            f"folders: create one database from each, beginning with {found.folder / first}; or "
            "rename what is a class."
        )
