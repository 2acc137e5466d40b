"""The plain mean: after a merge all workers continue from the mean of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from paceline.update.outer.outer_rule import Merged, OuterRule, replaced_by


@dataclass(frozen=True)
class Mean(OuterRule):
    """Plain mean, as in local SGD (Stich 2019; Zinkevich et al. 2010).

        own = anchor = mean

    Post-local SGD (Lin et al. 2018, "Don't Use Large Mini-Batches, Use Local SGD",
    arXiv 1808.07217) is this rule without a delay, with a schedule whose first phase merges after
    each step: `Average(every="1@0,50@1000", delay=0)`.

    With plain SGD and a merge after each step it equals training in one process: the mean of the
    workers' steps from equal weights is the step with the mean of their gradients.
    """

    def merge(
        self, own: Tensor, anchor: Tensor, mean: Tensor, state: Mapping[str, Tensor]
    ) -> Merged:
        """Return the mean as new own weights and as new anchor."""
        return replaced_by(mean, own, anchor, {})
