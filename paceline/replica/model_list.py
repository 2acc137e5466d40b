"""Several models that one call parallelizes together: one model for the exchange, several to users.

    paceline.parallelize([encoder, decoder], optimizer, world)

The exchange, snapshots and checkpoint files see one `ModelList`; what a user calls are its roots.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class ModelList(nn.ModuleList):
    """Module list of models that a user has as separate objects."""


def roots_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return the modules that a user calls: the models of a list, or the model itself."""
    return list(model) if isinstance(model, ModelList) else [model]
