"""The seam between databases and everything above them: a numbered list of records.

A `Record` is data as training wants it: an encoded image file or pixels in RGB order, and a label.
Which database and which record format it came from ends here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError

Pixels = npt.NDArray[np.uint8]


class SourceLost(DataError):
    """Error of a whole source: no record of it can be read any more."""


@dataclass(frozen=True, slots=True)
class Record:
    """Image and its label, as a source returns them.

    Attributes:
        image: the bytes of an encoded file (JPEG, PNG, …), or decoded pixels: uint8 of shape
            (height, width, channels), with 1 (grey) or 3 (RGB) channels.
        label: the class number, from 0.
    """

    image: bytes | Pixels
    label: int


class Source(Protocol):
    """Protocol of a source of image records by number; safe to read from several threads at once.

    Attributes:
        labels: int64 of shape (records,), the label of every record; None if the index doesn't hold
            them.
        label_names: the classes' names in the order of their labels; None if unknown.
        index_note: a sentence for the user if the index couldn't be saved, which makes every
            opening slow; else None.
        fingerprint: digest of the number of records and of a sample of them; equal for equal data
            sets.
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
