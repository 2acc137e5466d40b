"""The seam between decode processes and what they make of a record."""

from __future__ import annotations

from typing import Protocol

from paceline.data.order import Indices
from paceline.data.source import Pixels


class Maker(Protocol):
    """Protocol of what makes samples from records; it is pickled for the decode processes.

    Attributes:
        sample_bytes: bytes of a sample, at most.
        pinned: whether samples are copied to the device as they are.
    """

    @property
    def sample_bytes(self) -> int: ...
    @property
    def pinned(self) -> bool: ...

    def numbers(self, epoch: int, records: Indices) -> list[list[float]]:
        """Draw the random numbers of the samples of (n,) records."""

    def write(self, index: int, numbers: list[float], out: Pixels) -> int:
        """Write the sample of a record to `out`, uint8 of shape (sample_bytes,); return its label.

        Raises:
            DataError: the record gives no sample.
        """

    def name(self, index: int) -> str:
        """Name a record, for errors."""

    def close(self) -> None:
        """Close the records' database, in a decode process that ends."""
