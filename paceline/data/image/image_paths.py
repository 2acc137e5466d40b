"""Image files on disk as a source of records without labels."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.data.image.image_errors import DamagedImage
from paceline.data.image.image_file import check_readable, named_as_image
from paceline.data.source import Record
from paceline.errors import ConfigError, DataError


def find_images(places: Iterable[str]) -> list[str]:
    """Return the paths of image files: those that are given, and those anywhere in folders.

    In a folder, files count whose names have an image's suffix, in sorted order; hidden ones and
    links to folders don't.

    Args:
        places: paths of files and folders.

    Raises:
        ConfigError: there is no such file or folder, or a folder has no image.
        DataError: a folder can't be listed.
    """
    found: list[str] = []
    for place in places:
        if not Path(place).is_dir():
            if not os.path.lexists(place):
                raise ConfigError(f"{place}: there is no such file or folder; check the path.")
            found.append(place)
            continue
        inside = [*_inside(place)]
        if not inside:
            raise ConfigError(
                f"{place}: the folder has no image, by the files' names; give another folder, or "
                "the files themselves."
            )
        found += inside
    return found


def _inside(folder: str) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise DataError(
            f"{error.filename} can't be listed ({error.strerror}): check that this user may read "
            "it."
        ) from error

    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if named_as_image(name) and not name.startswith("."):
                yield os.path.join(parent, name)


class ImageFiles:
    """Source of image files, which have no labels.

    Args:
        paths: the files' paths.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self.labels: npt.NDArray[np.int64] | None = None
        self.label_names: tuple[str, ...] | None = None
        self.index_note: str | None = None
        self.fingerprint = ""

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Record:
        """Read a file.

        Raises:
            DataError: it can't be read, or is an image of a kind that isn't decoded.
        """
        path = self._paths[index]
        try:
            image = Path(path).read_bytes()
            check_readable(image, path)
        except OSError as error:
            raise DataError(f"{path} can't be read ({error.strerror}).") from error
        except DamagedImage as error:
            raise DataError(error.sentence(path)) from error
        return Record(image, 0)

    def name(self, index: int) -> str:
        """Return a file's path."""
        return self._paths[index]

    def close(self) -> None:
        """Close nothing."""
