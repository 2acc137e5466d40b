"""What a model of somebody's own returns is checked, and its failures are sentences."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.config.rules import positive
from paceline.errors import ConfigError, PacelineError, PeerLost
from paceline.models.output_check import check_output, explained_errors, explained_memory

IMAGES = torch.zeros(4, 3, 2, 2)


def test_logits_are_returned_as_they_are() -> None:
    logits = torch.zeros(4, 10)
    assert check_output(logits, 10, 4) is logits


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"logits": torch.zeros(4, 10), "aux": None}, "a dict of logits, aux: a model must return"),
        ((torch.zeros(4, 10), torch.zeros(1)), "a tuple of 2: .*only its logits"),
        (None, "a NoneType: a model must return logits, a Tensor of \\(4, 10\\) for 4 images"),
        (torch.zeros(4, 10).argmax(1), "torch.int64: .*not their argmax"),
        (torch.zeros(4, 7), "7 outputs per image, but --num_labels is 10: .*--num_labels 7"),
        (torch.zeros(4), "a Tensor of \\(4,\\): .*flatten or average"),
        (torch.zeros(3, 10), "a Tensor of \\(3, 10\\)"),
        (torch.zeros(4, 10, 1, 1), "a Tensor of \\(4, 10, 1, 1\\)"),
    ],
)
def test_anything_else_is_refused_with_the_rule_and_a_remedy(output: object, words: str) -> None:
    with pytest.raises(ConfigError, match=f"The model returned {words}"):
        check_output(output, 10, 4)


def test_a_batch_norm_of_one_value_is_a_sentence() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    words = r"one value per channel .*--batch_size, fewer workers"
    with pytest.raises(ConfigError, match=words), explained_errors(IMAGES):
        model(torch.zeros(1, 3))


def test_a_models_own_error_is_a_sentence_with_its_line_and_what_to_call_it_on() -> None:
    words = (
        r"failed with ValueError: expected 2D or 3D input \(got 4D input\) "
        r"\(test_model_output.py, line \d+\): .* torch.zeros\(4, 3, 2, 2\)"
    )
    with pytest.raises(ConfigError, match=words), explained_errors(IMAGES):
        nn.BatchNorm1d(2)(torch.zeros(2, 2, 2, 2))


def test_an_error_of_ours_stays_what_it_is() -> None:
    with pytest.raises(PeerLost), explained_errors(IMAGES):
        raise PeerLost("rank 1 is gone")
    with pytest.raises(TypeError), explained_errors(IMAGES):
        positive("flag", None)  # type: ignore[arg-type]


def test_too_little_memory_is_a_sentence_and_not_the_models_fault() -> None:
    words = r"Out of memory in a step, which asked for \d+ bytes: .*smaller --batch_size"
    with pytest.raises(PacelineError, match=words), explained_memory(), explained_errors(IMAGES):
        torch.empty(1 << 50)
