"""Tied weights: parameters that several stages have, such as an embedding's that is the head's too.

    forward, backward      a leaf with the weight's memory gets the gradients of all microbatches
    then                   the stages that have the weight sum their gradients, in stage order
    and then               the sum becomes the weight's own gradient, which is exchanged along data

So the exchange along data sends the sum, once, and the stages make the same update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.link import StageLink


def tied_weights(parts: Sequence[Sequence[nn.Module]]) -> dict[nn.Parameter, list[int]]:
    """Return the parameters that several stages have, with the indices of their stages.

    Args:
        parts: each stage's modules.
    """
    having: dict[nn.Parameter, list[int]] = {}
    for number, part in enumerate(parts):
        for p in dict.fromkeys(p for module in part for p in module.parameters()):
            having.setdefault(p, []).append(number)
    return {p: stages for p, stages in having.items() if len(stages) > 1}


class TiedWeights:
    """Tied weights of one stage.

    Args:
        parts: each stage's modules.
        stage: this one.

    Attributes:
        sizes: in bytes, of all tied weights of the model.
        counted: those of this stage that an earlier one has, too: it counts them.
    """

    def __init__(self, parts: Sequence[Sequence[nn.Module]], stage: int) -> None:
        tied = tied_weights(parts)
        self.sizes = [p.nbytes for p in tied]
        self.counted = {p for p, stages in tied.items() if stage in stages[1:]}
        every = enumerate(tied.items())
        self._own = [(n, p, stages) for n, (p, stages) in every if stage in stages]
        self._readers = [
            (module._parameters, name, p)
            for module in dict.fromkeys(m for block in parts[stage] for m in block.modules())
            for name, p in module._parameters.items()
            if any(p is own for _, own, _ in self._own)
        ]
        self._leaves: dict[Any, Tensor] = {}

    def divert(self) -> None:
        """Let the stage's modules read leaves in place of the weights, until `release`."""
        if not self._leaves:
            self._leaves = {p: p.detach().requires_grad_(p.requires_grad) for _, p, _ in self._own}
            for parameters, name, p in self._readers:
                parameters[name] = self._leaves[p]  # type: ignore[assignment]

    def restore(self) -> dict[Any, Tensor]:
        """Let the modules have their weights; return the leaves that they had instead."""
        leaves = self._leaves
        self._leaves = {}
        if leaves:
            for parameters, name, p in self._readers:
                parameters[name] = p
        return leaves

    def release(self, link: StageLink, batch: int) -> None:
        """Give each weight the sum of its gradients on all stages."""
        leaves = self.restore()
        for index, p, stages in self._own:
            if p.requires_grad:
                own = leaves[p].grad
                total = link.sum_tied(
                    index, torch.zeros_like(leaves[p]) if own is None else own, stages, batch
                )
                torch.autograd.backward([p], [total])
