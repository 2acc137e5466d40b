"""Paceline: distributed training of PyTorch models on ordinary machines.

    world = paceline.join()
    model, optimizer = paceline.parallelize(model, optimizer, world)
    for x, y in paceline.loader(dataset, batch_size=256, world=world):
        with world.step():
            …

The library's names are imported at their first use, so that `import paceline` doesn't import torch.
"""

from __future__ import annotations

import atexit
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.errors import (
    CheckpointError,
    CommError,
    CommTimeout,
    ConfigError,
    DataError,
    PacelineError,
    PeerLost,
    ReplicasDiffer,
)

if TYPE_CHECKING:
    from paceline.api import (
        BMUF,
        EASGD,
        Average,
        DiLoCo,
        Loader,
        Mean,
        OuterRule,
        Server,
        SparseLoCo,
        World,
        deferred_init,
        join,
        launch,
        loader,
        parallelize,
        stages,
        tensor_parallel,
    )

__all__ = [
    "BMUF",
    "EASGD",
    "Average",
    "CheckpointError",
    "CommError",
    "CommTimeout",
    "ConfigError",
    "DataError",
    "DiLoCo",
    "Loader",
    "Mean",
    "OuterRule",
    "PacelineError",
    "PeerLost",
    "ReplicasDiffer",
    "Server",
    "SparseLoCo",
    "World",
    "deferred_init",
    "join",
    "launch",
    "loader",
    "parallelize",
    "stages",
    "tensor_parallel",
]


def __getattr__(name: str) -> Any:
    """Import one of the library's names."""
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module("paceline.api"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*globals(), *__all__})


def _note_at_exit() -> None:
    """Say that a script has imported this package and torch and ends without having joined."""
    failed = hasattr(sys, "last_value")
    is_command = "paceline.cli.main" in sys.modules
    if failed or is_command or "torch" not in sys.modules:
        return
    if note := import_module("paceline.cluster.environment").note_at_exit():
        import_module("paceline.cluster.print_message").print_message(note)


atexit.register(_note_at_exit)
