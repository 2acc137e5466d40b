"""State that a script loads between two steps, which all ranks must load alike.

    model.load_state_dict(…)        the parameters' checksums, before the first such call
    optimizer.load_state_dict(…)    the checksum of what is loaded
    world.step()                    what has changed goes with the step's summary, and is compared

With ZeRO-1 each rank has only its shards of the optimizer's state, and the next step overwrites all
parameters but those of its shards: what one rank alone has loaded would be lost or spread, and no
comparison of the states would show it. A rank that loads other weights to evaluate them, and then
its own again, has changed nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from paceline.replica.checksums import Checksums, checksum, tree_checksum


class LoadWatch:
    """Watch of the loads of a model and its optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: Checksums | None = None
        self._optimizer: Checksums = {}

    def before_model(self) -> None:
        """Take the parameters' checksums, unless an earlier load since the last step has."""
        if self._before is None:
            self._before = self._present()

    def before_optimizer(self, state: Mapping[str, object]) -> None:
        """Take the checksum of an optimizer's state dict that is going to be loaded."""
        self._optimizer = {"the optimizer state that was loaded": tree_checksum(state)}

    def take(self) -> Checksums:
        """Return what was loaded since the last step, and forget it."""
        if self._before is None and not self._optimizer:
            return {}
        before = self._before
        loaded = dict(self._optimizer)
        self._before = None
        self._optimizer = {}
        if before is not None:
            for name, one in self._present().items():
                if before.get(name) != one:
                    loaded[f"the loaded {name}"] = one
        return loaded

    def _present(self) -> Checksums:
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of them by the script
            return {name: int(checksum(p)) for name, p in self._model.named_parameters()}
