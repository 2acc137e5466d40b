"""Loss and accuracies add up over batches and ranks."""

from __future__ import annotations

import pytest
import torch

from paceline.observe.tally import Tally, scores

LOGITS = torch.tensor([[9.0, 1, 2, 3, 4, 5], [0, 9, 8, 7, 6, 5], [1, 2, 3, 4, 5, 0]])
LABELS = torch.tensor([0, 2, 5])  # right at once, right among five, wrong


def test_scores_are_means_over_samples() -> None:
    tally = Tally(torch.device("cpu"))
    tally.add(torch.tensor(2.0), LOGITS, LABELS, 3)
    tally.add(torch.tensor(4.0), LOGITS[:1], LABELS[:1], 1)
    result = scores(tally.sums)
    assert (result.loss, result.accuracy, result.top5) == (2.5, 0.5, 0.75)
    assert result.samples == 4
    assert {name: float(mean) for name, mean in tally.means.items()} == {
        "loss": 2.5,
        "accuracy": 0.5,
    }


def test_a_borrowed_sample_does_not_count() -> None:
    tally = Tally(torch.device("cpu"))
    tally.add(torch.tensor(1.0), LOGITS, LABELS, 3)
    tally.add(torch.tensor(99.0), LOGITS[:1], LABELS[:1], 0)
    assert scores(tally.sums).samples == 3
    assert scores(tally.sums).loss == 1


def test_fewer_than_five_classes_are_all_among_the_first_five() -> None:
    tally = Tally(torch.device("cpu"))
    tally.add(torch.tensor(1.0), torch.tensor([[1.0, 0.0]]), torch.tensor([1]), 1)
    assert scores(tally.sums).top5 == pytest.approx(1)
