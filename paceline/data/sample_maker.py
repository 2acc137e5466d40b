"""From a record's number to its sample: read, check the label, augment, decode.

What the decode processes run. A sample depends on the seed, the epoch and its record's number,
never on the process that makes it or on its place in a batch. A record that gives no sample leaves
its slot as it is and is an error; what is to be done about it, the loader decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from paceline.data.image.augment import Transform
from paceline.data.image.decode import decode
from paceline.data.order import Indices, uniforms
from paceline.data.source import Pixels, Record, Source
from paceline.errors import DataError


@dataclass(frozen=True, kw_only=True)
class SampleMaker:
    """Sample maker: reads records, checks labels, augments and decodes.

    Attributes:
        source: the source of records.
        transform: the transform of each image.
        fill: the colour of the parts of a sample that the image doesn't cover, uint8 of shape
            (channels,).
        num_labels: number of classes: labels must be 0 to num_labels - 1; None: labels are not
            checked.
        pinned: samples are copied to the device as they are.
    """

    source: Source
    transform: Transform
    fill: Pixels
    num_labels: int | None

    pinned: ClassVar[bool] = True

    @property
    def sample_bytes(self) -> int:
        """Count the bytes of a sample."""
        return self.transform.image_size**2 * self.transform.channels

    def numbers(self, epoch: int, records: Indices) -> list[list[float]]:
        """Draw the random numbers of samples: `transform.draws` for each of (n,) records."""
        transform = self.transform
        return uniforms(transform.seed, epoch, records, transform.draws).tolist()  # type: ignore[no-any-return]

    def write(self, index: int, numbers: list[float], out: Pixels) -> int:
        """Make the sample of a record.

        Args:
            index: the record's number.
            numbers: the sample's random numbers, from `numbers`.
            out: receives the pixels, uint8 of shape (sample_bytes,), as (image_size, image_size,
                channels).

        Returns:
            Its label.

        Raises:
            DataError: the record is damaged, or its label is out of range.
        """
        record = self.read(index)
        self.decode(index, record.image, numbers, out)
        return record.label

    def decode(self, index: int, image: bytes | Pixels, numbers: list[float], out: Pixels) -> None:
        """Make the sample of a record that was read; see `write`.

        Raises:
            DataError: the image is damaged.
        """
        side = self.transform.image_size
        pixels = out.reshape(side, side, self.transform.channels)
        plan = partial(self.transform.view, numbers=numbers)
        decode(image, plan, pixels, fill=self.fill, name=partial(self.source.name, index))

    def name(self, index: int) -> str:
        """Name a record."""
        return self.source.name(index)

    def close(self) -> None:
        """Close the source."""
        self.source.close()

    def read(self, index: int) -> Record:
        """Read a record whose label is in range.

        Raises:
            DataError: the record is damaged, or its label is out of range.
        """
        record = self.source[index]
        if self.num_labels is not None and not 0 <= record.label < self.num_labels:
            raise DataError(
                f"{self.source.name(index)} has the label {record.label}, but with --num_labels "
                f"{self.num_labels}, labels must be 0 to {self.num_labels - 1}: change "
                "--num_labels, or create the database again."
            )
        return record
