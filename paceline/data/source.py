"""The seam between databases and everything above them: a numbered list of records.

A `Record` is data as training wants it: an encoded image file or pixels in RGB order, and a label.
Which database and which record format it came from ends here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Record:
    """Image and its label.

    Attributes:
        image: the bytes of an encoded file (JPEG, PNG, …), or decoded pixels of shape
            (height, width, channels) in uint8, channels 1 (grey) or 3 (RGB).
        label: the class, 0-based.
    """

    image: bytes | Pixels
    label: int


class Source(Protocol):
    """Protocol of image records by index; safe to read from several threads at once.

    Attributes:
        labels: the label of every record, int64 of shape (records,), where the index knows them.
        label_names: the classes' names in the order of their labels, where they are known.
        index_note: a sentence for the user about opening it, or "" (an index that can't be
            saved makes every opening slow).
        fingerprint: equal for equal data sets: a digest of their size and of a sample of records.
    """

    labels: npt.NDArray[np.int64] | None
    label_names: tuple[str, ...] | None
    index_note: str | None
    fingerprint: str

    def __len__(self) -> int:
        """Count the records."""

    def __getitem__(self, index: int) -> Record:
        """Read a record.

        Raises:
            DataError: the record is damaged or of an unknown or unexpected format; names its key.
        """

    def name(self, index: int) -> str:
        """Name a record for messages: "record KEY"."""

    def close(self) -> None:
        """Release the database."""
