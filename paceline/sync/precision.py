"""The arithmetic of a step, by torch's autocast and, for float16, its loss scaling.

With float16 the update needs the reduced gradients first: whether a step overflowed is then seen
by all ranks in the same values, and all skip it or none.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.sync.replica import Replica

DTYPES = {"float": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Precision:
    """Forward, backward and update in one of `DTYPES`; weights stay as they are."""

    def __init__(self, dtype: str, device: torch.device) -> None:
        self._dtype, self._device = DTYPES[dtype], device
        scaled = self._dtype is torch.float16
        self._scaler = torch.amp.GradScaler(device.type, enabled=True) if scaled else None

    def forward(self) -> AbstractContextManager[object]:
        """Compute inside the block in this precision."""
        return torch.autocast(
            self._device.type, dtype=self._dtype, enabled=self._dtype is not torch.float32
        )

    def backward_and_update(self, loss: Tensor, replica: Replica, optimizer: Optimizer) -> None:
        """Run backward from a scalar loss and the optimizer's step."""
        if self._scaler is None:
            loss.backward()
            optimizer.step()
        else:
            self._scaler.scale(loss).backward()
            replica.reduce()
            self._scaler.step(optimizer)
            self._scaler.update()
        optimizer.zero_grad()
