"""From a record's number to its sample: read, check the label, augment, decode.

What the decode threads run. A sample depends on the seed, the epoch and its record's number, never
on the thread that makes it or on its place in a batch. A record that gives no sample leaves its
slot as it is and is reported; what is to be done about it, the loader decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from paceline.data.image.augment import Transform
from paceline.data.image.decode import decode
from paceline.data.order import Indices, uniforms
from paceline.data.source import Pixels, Source
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
    """

    source: Source
    transform: Transform
    fill: Pixels
    num_labels: int | None

    def write(
        self, epoch: int, records: Indices, images: Pixels, labels: Indices
    ) -> dict[int, DataError]:
        """Make samples of records.

        Args:
            epoch: decides with the records' numbers what is random.
            records: their numbers, shape (n,).
            images: receives the pixels, shape (n, image_size, image_size, channels).
            labels: receives the labels, shape (n,).

        Returns:
            What is wrong with the records that are damaged, or whose label is out of range, by
            their numbers, in their order.
        """
        transform = self.transform
        numbers = uniforms(transform.seed, epoch, records, transform.draws).tolist()
        bad = {}
        for at, index in enumerate(records.tolist()):
            try:
                labels[at] = self._write_one(index, numbers[at], images[at])
            except DataError as error:
                bad[index] = error
        return bad

    def _write_one(self, index: int, numbers: list[float], out: Pixels) -> int:
        """Make the sample of a record with its random numbers; return its label."""
        record = self.source[index]
        if self.num_labels is not None and not 0 <= record.label < self.num_labels:
            raise DataError(
                f"{self.source.name(index)} has the label {record.label}, but with --num_labels "
                f"{self.num_labels}, labels must be 0 to {self.num_labels - 1}: change "
                "--num_labels, or create the database again."
            )
        plan = partial(self.transform.view, numbers=numbers)
        decode(record.image, plan, out, fill=self.fill, name=partial(self.source.name, index))
        return record.label
