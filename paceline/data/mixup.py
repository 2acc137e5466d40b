"""Mixup of samples: each is mixed with another record's, and so are their labels.

    image = (1 − w) · image_i + w · image_j      label = (i's, j's, w)      Zhang et al. 2018,
    w = min(λ, 1 − λ), λ ~ Beta(α, α)                          https://arxiv.org/abs/1710.09412

The partner j is drawn from all records, and augmented with random numbers of its own. Partner,
weight and augmentation depend on the seed, the epoch and record i alone, never on the batch that i
is in: so neither the number of workers nor an interruption changes a bit. A sample costs two
decoded images. A partner that can't be read leaves the sample as it is; its own turn reports it.

Both labels and the weight travel in the label's 64 bits, in which a plain label has the weight 0:

    bits 0 to 23    label of i
    bits 24 to 47   label of j
    bits 48 to 62   w · 2^15, at most 2^14
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.data.order import Indices, uniforms
from paceline.data.sample_maker import SampleMaker
from paceline.data.source import Pixels, SourceLost
from paceline.errors import DataError

MOST_LABELS = 1 << 24
WHOLE = 1 << 15  # the weight 1, in a label's bits


@dataclass(frozen=True, kw_only=True)
class MixupMaker(SampleMaker):
    """Sample maker that mixes each sample with another record's.

    Attributes:
        alpha: both parameters of the Beta distribution.
    """

    alpha: float

    def numbers(self, epoch: int, records: Indices) -> list[list[float]]:
        """Draw the random numbers of samples: those of both images, the partner's, the weight's."""
        count = 2 * self.transform.draws + 2
        return uniforms(self.transform.seed, epoch, records, count).tolist()  # type: ignore[no-any-return]

    def write(self, index: int, numbers: list[float], out: Pixels) -> int:
        """Make the sample of a record, as `SampleMaker`; return both labels and the weight.

        Raises:
            DataError: the record is damaged, or its label is out of range.
        """
        draws = self.transform.draws
        label = super().write(index, numbers[:draws], out)
        choice, chance = numbers[2 * draws :]
        partner = int(choice * len(self.source))
        other = np.empty_like(out)
        try:
            other_label = super().write(partner, numbers[draws : 2 * draws], other)
        except SourceLost:
            raise
        except DataError:
            return label
        weight = _weight(chance, self.alpha)
        # In integers, so that all processors round alike.
        mixed = out.astype(np.uint32) * (WHOLE - weight) + other.astype(np.uint32) * weight
        out[:] = (mixed + WHOLE // 2) >> 15
        return label | other_label << 24 | weight << 48


def _weight(chance: float, alpha: float) -> int:
    """Draw a partner's weight, at most 1/2, in units of 2^-15, given a number in [0, 1)."""
    share = np.random.default_rng(int(chance * 2**53)).beta(alpha, alpha)
    return round(min(share, 1 - share) * WHOLE)
