"""BatchNorm's running statistics: the mean of the ranks' own, installed before each step.

A running mean is linear in the batches' means, so the mean of the ranks' running means is the
running mean of the ranks' means. The statistics of a step's forward travel first in its backward (a
ResNet's are 0.2% of its gradients) and are there when the next step begins. Settling only installs
what has arrived: it never exchanges anything, so one rank alone may call `state_dict()`, and since
all ranks install the same between the same steps, that changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.update.sync_batch_norm import SyncBatchNorm


class RunningStatistics:
    """All running statistics of a model, flat, but those of `SyncBatchNorm`: they are equal.

    Attributes:
        flat: (values,) in the widest of their dtypes, or None where there are none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owned: Sequence[tuple[nn.Module, Tensor]] = [
            (module, buffer)
            for module in model.modules()
            if isinstance(module, _NormBase) and not isinstance(module, SyncBatchNorm)
            for buffer in (module.running_mean, module.running_var)
            if buffer is not None
        ]
        self._buffers = [buffer for _, buffer in self._owned]
        self._moving: set[nn.Module] = set()
        self.flat: Tensor | None = None
        if self._buffers:
            self.flat = torch.cat([buffer.detach().flatten() for buffer in self._buffers])

    def pack(self) -> None:
        """Copy the statistics of this rank."""
        if self.flat is not None:
            torch.cat([buffer.flatten() for buffer in self._buffers], out=self.flat)
            self._moving = {module for module, _ in self._owned if module.training}

    @torch.no_grad()
    def install(self, mean: Tensor) -> None:
        """Copy the ranks' mean, (values,), into the model; statistics of frozen modules stay."""
        means = torch.split(mean, [buffer.numel() for buffer in self._buffers])
        moving = [module in self._moving for module, _ in self._owned]
        if any(moving):
            buffers = list(compress(self._buffers, moving))
            torch._foreach_copy_(buffers, list(compress(means, moving)))
