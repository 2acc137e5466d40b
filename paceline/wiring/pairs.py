"""Pair of a model and one of its optimizers, with the options of their exchange."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from paceline.config.world import SyncConfig
from paceline.replica.model_list import roots_of
from paceline.replica.trained_parameters import Scope
from paceline.update.batch_norm import BatchShare
from paceline.update.outer.average import Average


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """A model, or a list of models, and one of its optimizers.

    Attributes:
        scope: what the pair has of the model, where several optimizers train it.
        entries: of checkpoint files, for the model's and the optimizer's state dict.
        config: how gradients are exchanged.
        share: this rank's share of each step.
        average: how weights are averaged; None: gradients are exchanged.
        buffers: "broadcast": rank 0's are all ranks' after each step; "local": they are each
            rank's own, and aren't compared.
    """

    model: nn.Module
    optimizer: Optimizer
    scope: Scope
    entries: tuple[str, str]
    config: SyncConfig
    share: BatchShare
    average: Average | None = None
    buffers: str = "broadcast"

    @property
    def name(self) -> str:
        """The class of the model, or those of the list's models."""
        return ", ".join(type(root).__name__ for root in roots_of(self.model))
