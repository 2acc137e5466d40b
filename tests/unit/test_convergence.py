"""`--target_accuracy` and `--patience` end a run by the accuracies of its evaluations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.run.convergence import Convergence
from paceline.snapshots.position import Position


def epochs_of(accuracies: Sequence[float], rule: Convergence) -> tuple[int, str]:
    """Return how many epochs a run has, of those with such accuracies, and why."""
    position = Position()
    for epoch, accuracy in enumerate(accuracies):
        if position.best is None or accuracy > position.best:
            position.best = accuracy
            position.best_epoch = epoch
        position.epoch = epoch + 1
        if reason := rule.reason(position):
            return epoch + 1, reason
    return len(accuracies), ""


@pytest.mark.parametrize(
    ("accuracies", "flags", "epochs", "reason"),
    [
        ((0.5, 0.75, 0.9), {}, 3, ""),
        ((0.0, 0.0, 0.0), {}, 3, ""),
        (
            (0.5, 0.75, 0.9),
            {"target_accuracy": 0.75},
            2,
            "the test accuracy has reached 75.00% (--target_accuracy 0.75)",
        ),
        ((0.5, 0.7499, 0.5), {"target_accuracy": 0.75}, 3, ""),
        (
            (0.5, 0.5, 0.6, 0.6, 0.4, 0.7),
            {"patience": 2},
            5,
            "2 evaluations after epoch 3 had no better test accuracy than its 60.00% (--patience "
            "2)",
        ),
        (
            (0.5, 0.5),
            {"patience": 1},
            2,
            "1 evaluation after epoch 1 had no better test accuracy than its 50.00% (--patience 1)",
        ),
        ((0.5, 0.4, 0.6, 0.5, 0.7), {"patience": 2}, 5, ""),
    ],
)
def test_a_run_ends_at_its_target_or_without_a_better_evaluation(
    accuracies: Sequence[float], flags: dict[str, float], epochs: int, reason: str
) -> None:
    assert epochs_of(accuracies, Convergence(**flags)) == (epochs, reason)  # type: ignore[arg-type]


def test_a_run_that_was_never_evaluated_continues() -> None:
    rule = Convergence(target_accuracy=0.1, patience=1)
    assert rule.reason(Position(epoch=5)) == ""
