"""Loss and accuracies add up over batches and ranks."""

from __future__ import annotations

import pytest
import torch

from paceline.observe.score_counter import BATCH_SUMS, add_scores, scores

LOGITS = torch.tensor([[9.0, 1, 2, 3, 4, 5], [0, 9, 8, 7, 6, 5], [1, 2, 3, 4, 5, 0]])
LABELS = torch.tensor([0, 2, 5])  # right at once, right among five, wrong


def test_scores_are_means_over_samples() -> None:
    sums = torch.zeros(BATCH_SUMS, dtype=torch.float64)
    add_scores(sums, torch.tensor(2.0), LOGITS, LABELS, 3)
    add_scores(sums, torch.tensor(4.0), LOGITS[:1], LABELS[:1], 1)
    result = scores(sums.tolist())
    assert (result.loss, result.accuracy, result.top5) == (2.5, 0.5, 0.75)
    assert result.samples == 4


def test_a_borrowed_sample_does_not_count() -> None:
    sums = torch.zeros(BATCH_SUMS, dtype=torch.float64)
    add_scores(sums, torch.tensor(1.0), LOGITS, LABELS, 3)
    add_scores(sums, torch.tensor(99.0), LOGITS[:1], LABELS[:1], 0)
    assert scores(sums.tolist()).samples == 3
    assert scores(sums.tolist()).loss == 1


def test_fewer_than_five_classes_are_all_among_the_first_five() -> None:
    sums = torch.zeros(BATCH_SUMS, dtype=torch.float64)
    add_scores(sums, torch.tensor(1.0), torch.tensor([[1.0, 0.0]]), torch.tensor([1]), 1)
    assert scores(sums.tolist()).top5 == pytest.approx(1)
