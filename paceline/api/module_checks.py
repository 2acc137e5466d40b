"""Modules that `parallelize` refuses, because replicas would differ or no hook can wait in them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.replica.read_tracing import renormalised, scaled_by_frequency
from paceline.replica.trained_parameters import require_whole

_EXCHANGES = (
    *("DistributedDataParallel", "FullyShardedDataParallel", "ShardedDataParallel"),
    "DataParallel",
)
"""Wrappers that exchange gradients or parameters by themselves: torch's, and those of FairScale."""


def require_supported_modules(model: nn.Module, device: torch.device) -> None:
    """Require that all modules train alike on all ranks, and have hooks.

    Args:
        model: the model.
        device: on which this rank computes.

    Raises:
        ConfigError: an embedding renormalises its table or scales its gradient, a module is
            TorchScript or exchanges by itself, or a tensor isn't whole.
    """
    for name, module in model.named_modules():
        path = f"the model's {name}" if name else "the model"
        for base in type(module).__mro__:
            if base.__name__ in _EXCHANGES:
                raise ConfigError(
                    f"{path} is wrapped in {base.__name__}, which exchanges gradients or "
                    "parameters, too: pass the unwrapped module."
                )
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{path} is a TorchScript module, which reads parameters where no hook can wait "
                "for their update: pass the module itself, which torch.jit.trace() can trace after "
                "training; to compile it, call torch.compile."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            if module.max_norm is not None:
                raise renormalised(f"{path} has max_norm={module.max_norm}")
            if module.scale_grad_by_freq:
                raise scaled_by_frequency(f"{path} has scale_grad_by_freq=True")
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, tensor in tensors.items():
                if tensor is not None:
                    if tensor.is_meta and device.type != "meta":
                        raise ConfigError(
                            f"{path} has a {kind} {key} without values, on the meta device: pass "
                            "the model to paceline.stages() first, which gives each stage its "
                            "values (one process, too), or build it without "
                            'paceline.deferred_init() and torch.device("meta").'
                        )
                    require_whole(f"the model's {f'{name}.{key}' if name else key}", tensor)
                    _require_dense(tensor, f"{path} has a {kind} {key}")


def _require_dense(tensor: Tensor, subject: str) -> None:
    if tensor.layout is not torch.strided:
        raise ConfigError(
            f"{subject} of layout {tensor.layout}, which isn't sent to the other ranks: keep its "
            "indices and values in two of them."
        )
