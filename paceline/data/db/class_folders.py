"""A folder of class folders: which classes there are and which files could be their images.

    FOLDER/cat/1.jpg            label 0, "cat"
    FOLDER/cat/2019/7.png       label 0
    FOLDER/dog/1.jpg            label 1, "dog"

A class's label is its position among the sorted names of the subfolders. Names that begin with a
dot are neither classes nor images (`.ipynb_checkpoints`, `._photo.jpg`), nor is what archives,
desktops and network disks leave behind (`__MACOSX`, `@eaDir`). A folder of `train/` and `test/`
with the same classes inside is not a folder of two classes, and is refused, whatever else is there.

Links are followed. A link to a folder above it is skipped, because it leads in a circle:

    FOLDER/cat/more -> /disk/cats       its files are cat/more/…
    FOLDER/cat/all -> FOLDER            skipped
    FOLDER/dog -> /disk/dogs            a class; an error where /disk isn't there
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, DataError

SPLITS = {  # the usual names of a data set's splits
    *("train", "training", "val", "valid", "validation", "dev", "eval", "evaluation"),
    *("test", "testing", "holdout"),
}

_LEFT_BEHIND = {  # in lower case, besides names that begin with a dot
    *(
        "__macosx",
        "__pycache__",
        "@eadir",
        "@recycle",
        "#recycle",
        "@tmp",
        "#snapshot",
        "@sharebin",
    ),
    *("$recycle.bin", "system volume information", "lost+found"),
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"),
}


_Identity = tuple[int, int]  # of a folder: its device and inode


@dataclass(frozen=True, slots=True)
class Candidate:
    """File that may be an image; `name` is its path relative to the parent of the class folders."""

    name: str
    label: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class ClassFolders:
    """Class folders in label order, with their files in sorted order, and the skipped entries.

    Attributes:
        skipped: number of entries that are left out: hidden ones, and entries that are neither
            files nor folders.
        beside: names of the entries next to the class folders, in sorted order, but hidden ones.
        link_cycles: links to a folder above them, which are left out too.
    """

    folder: Path
    classes: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    skipped: int
    beside: tuple[str, ...]
    link_cycles: tuple[str, ...]


def scan(folder: Path) -> ClassFolders:
    """List the classes of `folder` and their files, at any depth.

    A link to no file is a candidate, which can't be read.

    Raises:
        ConfigError: there is no class folder, the folders are the splits of a data set, or a
            class's name can't be a line of a text file.
        DataError: a folder can't be listed, or a class folder is a link to nothing.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
        visible = [name for name in names if not _is_left_behind(name)]
        _refuse_dead_links(folder, visible)
        folders = [name for name in visible if (folder / name).is_dir()]
        above = tuple(map(_identity, (folder, *folder.resolve().parents)))
        classes = [name for name in folders if _identity(folder / name) not in above]
        if not classes:
            raise ConfigError(
                f"{folder} has no subfolders: put the images of each class in {folder}/<class>."
            )
        candidates: list[Candidate] = []
        link_cycles = [name for name in folders if name not in classes]
        beside = tuple(name for name in visible if name not in folders)
        skipped = len(names) - len(visible)
        for label, name in enumerate(classes):
            if len(name.splitlines()) > 1 or any("\ud800" <= c <= "\udfff" for c in name):
                raise ConfigError(
                    f"{str(folder / name)!r}: the name of a class must be UTF-8 without line "
                    "breaks; rename the folder."
                )
            for path in _walk(folder / name, name, above, link_cycles):
                if path is None:
                    skipped += 1
                else:
                    candidates.append(Candidate(path, label))
        found = ClassFolders(
            folder=folder,
            classes=tuple(classes),
            candidates=tuple(candidates),
            skipped=skipped,
            beside=beside,
            link_cycles=tuple(link_cycles),
        )
    except OSError as error:
        raise DataError(
            f"{error.filename} can't be listed: {error.strerror}. Check the disk, and that this "
            "user may read the folder."
        ) from error
    _refuse_splits(found)
    return found


def shuffled(candidates: Sequence[Candidate], seed: int) -> list[Candidate]:
    """Order candidates by a hash of seed and name.

    The order is the same on every machine and for every version of Python, and taking a file away
    leaves that of the others as it was.
    """
    return sorted(
        candidates, key=lambda c: hashlib.sha256(os.fsencode(f"{seed}/{c.name}")).digest()
    )


def _walk(
    folder: Path, name: str, above: tuple[_Identity, ...], link_cycles: list[str]
) -> Iterator[str | None]:
    """Yield names of files below `folder`, beginning with `name`, sorted; None for skipped ones.

    Args:
        name: its name in the data set.
        above: the folders that lead to it.
        link_cycles: receives the names of links to one of them, or to the folder itself.
    """
    own = _identity(folder)
    if own in above:
        link_cycles.append(name)
        return
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            path = folder / entry.name
            entry_name = f"{name}/{entry.name}"
            if _is_left_behind(entry.name):
                yield None
            elif path.is_dir() if entry.is_symlink() else entry.is_dir():
                yield from _walk(path, entry_name, (*above, own), link_cycles)
            else:
                is_file = path.is_file() if entry.is_symlink() else entry.is_file()
                yield entry_name if is_file or _is_dead_link(path) else None


def _identity(folder: Path) -> _Identity:
    found = folder.stat()
    return found.st_dev, found.st_ino


def _is_left_behind(name: str) -> bool:
    """Return whether an entry is hidden, or no part of a data set, by its name."""
    return name.startswith(".") or name.lower() in _LEFT_BEHIND


def _is_dead_link(path: Path) -> bool:
    """Return whether a path is a link to nothing, or to itself."""
    return path.is_symlink() and not path.exists()


def _refuse_dead_links(folder: Path, names: Sequence[str]) -> None:
    """Refuse links to nothing where the classes are: without one all labels could be others."""
    dead = [name for name in names if _is_dead_link(folder / name)]
    if dead:
        target = os.readlink(folder / dead[0])
        raise DataError(
            f"{folder / dead[0]} is a link to {target}, which isn't there: mount the disk that has "
            "it, or remove the link."
        )


def _refuse_splits(found: ClassFolders) -> None:
    """Refuse folders named as splits of a data set, if one is empty or names in them recur."""
    splits: dict[str, set[str]] = {name: set() for name in found.classes if name.lower() in SPLITS}
    empty = set(splits)
    for candidate in found.candidates:
        name, *subfolders, _ = candidate.name.split("/")
        if name in splits:
            empty.discard(name)
            splits[name].update(subfolders[:1])
    with_folders = [name for name, subfolders in splits.items() if subfolders]
    recurring = len(set().union(*splits.values())) < sum(map(len, splits.values()))
    if recurring or (empty and with_folders):
        folders = " and ".join(f"{name}/" for name in with_folders)
        first = next((n for n in with_folders if n.lower().startswith("train")), with_folders[0])
        raise ConfigError(
            f"{found.folder} has {folders}, {'each of ' if recurring else ''}which contains class "
            f"folders: create one database from each, beginning with {found.folder / first}; or "
            "rename what is a class."
        )
