"""A text file that is appended to line by line, whose failures are sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import PacelineError


class LineFile:
    """Appends to `path`; a line is handed to the system whole and at once.

    Raises:
        PacelineError: the file can't be opened or written (disk, permissions), here and in `write`
            and `close`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _sentence(self.path):
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, line: str) -> None:
        """Append a line."""
        with _sentence(self.path):
            self._file.write(line + "\n")

    def close(self) -> None:
        """Close the file."""
        with _sentence(self.path):
            self._file.close()


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        PacelineError: it can't be written.
    """
    with _sentence(path):
        part = path.with_name(f".{path.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)


@contextmanager
def _sentence(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PacelineError(
            f"{path} can't be written ({error.strerror}): make room, or give another --output_dir."
        ) from error
