"""Precision of a step: torch's autocast, loss scaling for float16, and clipping.

Loss scaling and clipping need the reduced gradients before the update. So whether a step
overflowed is seen by all ranks in the same values, and all skip it or none; and a norm is that of
the gradient of the whole global batch.

    backward ── reduce ── unscale ── clip by norm ── clip by value ── optimizer's step
                └ where there is scaling or clipping

Processors without bfloat16 instructions convert every value to float32 and back, which is slower
than float32 itself. They have them with AVX512-BF16 or AMX (Intel since 2020 and 2023, AMD since
2022), or ARM's BF16 extension; NVIDIA's GPUs from compute capability 8.0 (Ampere) on; AMD's all.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from paceline.replica.group import AnyReplica

DTYPES = {"float": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
_MIN_COMPUTE_CAPABILITY = 8  # major version; of NVIDIA's first GPUs with bfloat16


class Precision:
    """Precision of forward and backward, one of `DTYPES`; the weights keep their dtype.

    Args:
        dtype: a key of `DTYPES`.
        device: device of the model.
        clip_norm: the largest 2-norm of all gradients together; 0: no clipping.
        clip_value: the largest absolute value of a gradient's element, applied after `clip_norm`;
            0: no clipping.
    """

    def __init__(
        self,
        dtype: str,
        device: torch.device,
        *,
        clip_norm: float = 0.0,
        clip_value: float = 0.0,
    ) -> None:
        self._dtype = DTYPES[dtype]
        self._device = device
        self._clip_norm = clip_norm
        self._clip_value = clip_value
        scaled = self._dtype is torch.float16  # a disabled scaler changes nothing
        self._scaler = torch.amp.GradScaler(device.type, enabled=scaled)

    def get_scale(self) -> float:
        """Return the loss scale of the next step; 1 without loss scaling."""
        return self._scaler.get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of loss scaling, which is empty without it."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of loss scaling; an interrupted step is forgotten."""
        self._scaler.load_state_dict(state)
        if self._scaler.is_enabled():
            self._scaler._per_optimizer_states.clear()

    def forward(self) -> AbstractContextManager[object]:
        """Compute inside the block in this precision."""
        if self._dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def backward_and_update(self, loss: Tensor, replica: AnyReplica, optimizer: Optimizer) -> bool:
        """Run backward from a scalar loss and the optimizer's step, within the replica's step.

        Returns:
            False where float16 overflowed and all ranks skipped the update.

        Raises:
            ConfigError: a rule of the exchange was broken.
            CommError: a peer was lost, or silent.
        """
        self._scaler.scale(loss).backward()
        return self.update(replica, optimizer)

    def update(self, replica: AnyReplica, optimizer: Optimizer) -> bool:
        """Run the optimizer's step alone, after backward; the rest is as there."""
        if self._scaler.is_enabled() or self._clip_norm or self._clip_value:
            replica.reduce()
        self._scaler.unscale_(optimizer)
        self._clip(optimizer)
        self._scaler.step(optimizer)
        self._scaler.update()
        updated = replica.ended
        optimizer.zero_grad()
        return updated

    def _clip(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._clip_norm:
            clip_grad_norm_(parameters, self._clip_norm)
        if self._clip_value:
            clip_grad_value_(parameters, self._clip_value)


def computes_bfloat16(capabilities: Mapping[str, object]) -> bool:
    """Return whether a device of these capabilities has instructions for bfloat16.

    Args:
        capabilities: of a processor, as `torch.cpu.get_capabilities()` names them; of a GPU, its
            `compute_capability`, an int, or `hip`: it is AMD's.
    """
    if any(capabilities.get(name) for name in (*_INSTRUCTIONS, "hip")):
        return True
    capability = capabilities.get("compute_capability", 0)
    return isinstance(capability, int) and capability >= _MIN_COMPUTE_CAPABILITY


def capabilities_of(device: torch.device) -> Mapping[str, object]:
    """Return a device's capabilities; on a GPU this makes its context."""
    if device.type == "cpu":
        if hasattr(torch.cpu, "get_capabilities"):  # in torch's newer versions
            return torch.cpu.get_capabilities()
        return {
            "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
            "amx_bf16": torch.cpu._is_amx_tile_supported(),
        }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"compute_capability": properties.major, "hip": torch.version.hip is not None}
    return {"hip": True}  # other devices: assumed to compute in it
