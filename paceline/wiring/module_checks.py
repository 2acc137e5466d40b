"""Modules that `parallelize` refuses, because replicas would differ or no hook can wait in them."""

from __future__ import annotations

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.replica.read_tracing import renormalised


def require_supported_modules(model: nn.Module) -> None:
    """Require that all modules train alike on all ranks, and have hooks.

    Raises:
        ConfigError: an embedding renormalises its table, or a module is TorchScript.
    """
    for name, module in model.named_modules():
        path = f"the model's {name}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{path} is a TorchScript module, which reads parameters where no hook can wait "
                "for their update: pass the module itself, which torch.jit.trace() can trace after "
                "training; to compile it, call torch.compile."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise renormalised(f"{path} has max_norm={module.max_norm}")
