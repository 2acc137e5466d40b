"""BatchNorm's running statistics: each rank's own in training, their mean when settled.

A running mean is linear in the batches' means, so the mean of the ranks' running means is the
running mean of the ranks' means. Each step therefore sends the running statistics along with the
gradients (a ResNet's are 0.2% of them), and settling only installs what has arrived: it never
exchanges anything, so one rank alone may call `state_dict()`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class RunningStatistics:
    """All floating-point running statistics of a model, flat.

    Attributes:
        flat: (values,) in the widest of their dtypes, or None where there are none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers: Sequence[Tensor] = [
            buffer
            for module in model.modules()
            if isinstance(module, _NormBase)
            for buffer in (module.running_mean, module.running_var)
            if buffer is not None
        ]
        self.flat: Tensor | None = None
        if self._buffers:
            self.flat = torch.cat([buffer.detach().flatten() for buffer in self._buffers])

    def pack(self, weight: float) -> None:
        """Copy the statistics of this rank, times `weight`."""
        if self.flat is not None:
            torch.cat([buffer.flatten() for buffer in self._buffers], out=self.flat)
            self.flat.mul_(weight)

    @torch.no_grad()
    def install(self) -> None:
        """Copy the exchanged statistics into the model."""
        if self.flat is None:
            return
        sizes = [buffer.numel() for buffer in self._buffers]
        for buffer, values in zip(self._buffers, torch.split(self.flat, sizes), strict=True):
            buffer.copy_(values.view_as(buffer))
