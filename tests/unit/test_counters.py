"""Loss and accuracies add up over batches and ranks."""

from __future__ import annotations

import pytest
import torch

from paceline.observe.score_counter import TOLD, ScoreCounter, scores, so_far

LOGITS = torch.tensor([[9.0, 1, 2, 3, 4, 5], [0, 9, 8, 7, 6, 5], [1, 2, 3, 4, 5, 0]])
LABELS = torch.tensor([0, 2, 5])  # right at once, right among five, wrong


def test_scores_are_means_over_samples() -> None:
    counter = ScoreCounter(torch.zeros(TOLD, dtype=torch.float64))
    counter.add(torch.tensor(2.0), LOGITS, LABELS, 3)
    counter.add(torch.tensor(4.0), LOGITS[:1], LABELS[:1], 1)
    result = scores(counter.sums.tolist())
    assert (result.loss, result.accuracy, result.top5) == (2.5, 0.5, 0.75)
    assert result.samples == 4
    assert so_far(counter.sums.tolist()) == (2.5, 0.5)


def test_nothing_is_known_before_the_first_batch() -> None:
    assert so_far([0.0] * TOLD) is None


def test_a_borrowed_sample_does_not_count() -> None:
    counter = ScoreCounter(torch.zeros(TOLD, dtype=torch.float64))
    counter.add(torch.tensor(1.0), LOGITS, LABELS, 3)
    counter.add(torch.tensor(99.0), LOGITS[:1], LABELS[:1], 0)
    assert scores(counter.sums.tolist()).samples == 3
    assert scores(counter.sums.tolist()).loss == 1


def test_fewer_than_five_classes_are_all_among_the_first_five() -> None:
    counter = ScoreCounter(torch.zeros(TOLD, dtype=torch.float64))
    counter.add(torch.tensor(1.0), torch.tensor([[1.0, 0.0]]), torch.tensor([1]), 1)
    assert scores(counter.sums.tolist()).top5 == pytest.approx(1)
