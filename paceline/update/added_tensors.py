"""Detector of parameters and buffers that a model gets after it was bound.

    paceline.parallelize(model, …)
    spectral_norm(model[0])             registers buffers with random values: each rank's own
    model.head = nn.Linear(8, 2)        replaces parameters by others of the same names
    with world.step(): …                begins with rank 0's values on all ranks

They are found by names and identities. A buffer is identified by its module, because a forward may
replace its value.
"""

from __future__ import annotations

from torch import nn


class AddedTensors:
    """Detector of the tensors that are added to a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = self._present()

    def take_added(self) -> list[str]:
        """Return the names of tensors that were added since the last call, and forget them."""
        known = self._known
        self._known = self._present()
        return sorted(name for name, _ in self._known - known)

    def _present(self) -> set[tuple[str, nn.Parameter | nn.Module]]:
        """Return the names of all tensors; each with the parameter, or with the buffer's module."""
        found: set[tuple[str, nn.Parameter | nn.Module]] = set(self._model.named_parameters())
        for prefix, module in self._model.named_modules():
            # Module by module, because the pair has the module that owns the buffer.
            for name, _ in module.named_buffers(prefix, recurse=False):
                found.add((name, module))
        return found
