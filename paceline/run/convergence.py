"""End of a run before its last epoch: `--target_accuracy`, `--patience`.

    after each evaluation   best ≥ target accuracy              → end
                            epochs since the best ≥ patience    → end

The position has the best accuracy and its epoch. It is the same on all ranks, and in each
checkpoint. So the rule has no state of its own: all ranks end at the same boundary, and a run that
was killed ends where an undisturbed one does.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import many
from paceline.snapshots.position import Position


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """Rule by which a run ends before its last epoch.

    Attributes:
        target_accuracy: the accuracy on the test data that ends it, from 0 to 1; 0: none does.
        patience: the number of evaluations in a row without a better accuracy; 0: none ends it.
    """

    target_accuracy: float = 0.0
    patience: int = 0

    def reason(self, position: Position) -> str:
        """Return why a run ends between two epochs, a clause; "" where it continues."""
        best = position.best
        last = position.best_epoch
        if best is None or last is None:
            return ""
        if 0 < self.target_accuracy <= best:
            return (
                f"the test accuracy has reached {best:.2%} (--target_accuracy "
                f"{self.target_accuracy:g})"
            )
        if 0 < self.patience <= position.epoch - 1 - last:
            return (
                f"{many(self.patience, 'evaluation')} after epoch {last + 1} had no better test "
                f"accuracy than its {best:.2%} (--patience {self.patience})"
            )
        return ""
