"""Made-up images, for measuring a step without a database (`--train_data null`).

Record i is a pure function of (seed, i), as a record of a database is: raw noise from SplitMix64
and a label from the same stream. Making one costs less than decoding a file of its size.
"""

from __future__ import annotations

import numpy as np

from paceline.data import splitmix
from paceline.data.source import Record, Source

_IMAGE = 3  # a purpose beside those of the order


class SyntheticSource(Source):
    """Source of random noise images with random labels, generated when they are read.

    Args:
        image_size: height and width in pixels.
        channels: 1 (grey) or 3 (RGB).
        num_labels: number of classes: labels are 0 to num_labels - 1.
        seed: seed of the images; different seeds give different images.
    """

    labels = label_names = index_note = None  # labels are made with their images

    def __init__(
        self, records: int, image_size: int, channels: int, num_labels: int, seed: int = 0
    ) -> None:
        self._records = records
        self._shape = (image_size, image_size, channels)
        self._num_labels = num_labels
        self._seed = seed
        shape = "x".join(map(str, self._shape))
        self.fingerprint = f"synthetic-{records}-{shape}-{seed}"

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, index: int) -> Record:
        """Make a record: eight pixels' bytes from each random word, the label from the first.

        Raises:
            IndexError: there is no such record.
        """
        if not 0 <= index < self._records:
            raise IndexError(
                f"record {index} doesn't exist: there are {self._records} records, numbered from 0"
            )
        size = int(np.prod(self._shape))
        words = splitmix.stream(splitmix.base(self._seed, _IMAGE, index), 1 + -(-size // 8))
        pixels = words[1:].astype("<u8", copy=False).view(np.uint8)[:size].reshape(self._shape)
        return Record(image=pixels, label=int(words[0] % np.uint64(self._num_labels)))

    def name(self, index: int) -> str:
        """Name a record by its number."""
        return f"made-up record {index}"

    def close(self) -> None:
        """Release nothing."""
