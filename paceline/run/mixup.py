"""Mixup of the training's samples (`--mixup`), and the loss by both labels of each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.data.mixup import MOST_LABELS, WHOLE, MixupMaker
from paceline.data.sample_maker import SampleMaker
from paceline.run.extension import Extension


class Mixup(Extension, nn.Module):
    """Mixup, and its cross entropy: (1 − w) · loss by i's label + w · loss by j's; their mean.

    Args:
        alpha: both parameters of the Beta distribution.
        label_smoothing: as torch's `CrossEntropyLoss` has it, for both labels.
    """

    def __init__(self, alpha: float, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self._alpha = alpha
        self._smoothing = label_smoothing

    def maker(self, maker: SampleMaker) -> SampleMaker:
        """Return what makes mixed samples."""
        return MixupMaker(**vars(maker), alpha=self._alpha)

    def criterion(self, criterion: nn.Module) -> nn.Module:
        """Return the loss of mixed samples."""
        return self

    def scored(self, labels: Tensor) -> Tensor:
        """Return the labels of the images that have the larger weight."""
        return labels & (MOST_LABELS - 1)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of logits, (n, classes), given labels, (n,), as `MixupMaker` has them."""
        one, other = (
            cross_entropy(logits, own, reduction="none", label_smoothing=self._smoothing)
            for own in (self.scored(labels), self.scored(labels >> 24))
        )
        return torch.lerp(one, other, (labels >> 48).to(one.dtype) / WHOLE).mean()
