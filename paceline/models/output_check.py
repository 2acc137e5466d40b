"""What a model must give, and what it fails with in training, as sentences.

A user's model may return anything; the loss and the accuracy need logits, a Tensor of
(n, num_labels) for n images.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from paceline.errors import ConfigError, PacelineError
from paceline.models.error_origin import described, is_ours, lacks_memory

_ASKED = re.compile(r"allocate ([\d.]+ \w+)")  # in torch's words


def check_output(output: object, num_labels: int, count: int) -> Tensor:
    """Return a model's output if it is logits.

    Args:
        output: what the model returned.
        num_labels: classes.
        count: images that it was given.

    Raises:
        ConfigError: it is no floating-point Tensor of (count, num_labels).
    """
    rule = f"a model must return logits, a Tensor of ({count}, {num_labels}) for {count} images"
    if not isinstance(output, Tensor):
        raise ConfigError(
            f"The model returned {_described(output)}: {rule}; the function given with "
            "--model must make a model that returns only its logits."
        )
    if not output.is_floating_point():
        raise ConfigError(
            f"The model returned {output.dtype}: {rule}; return the floating-point logits, not "
            "their argmax."
        )
    if output.ndim == 2 and output.shape[0] == count and output.shape[1] != num_labels:
        raise ConfigError(
            f"The model returned {output.shape[1]} outputs per image, but --num_labels is "
            f"{num_labels}: they must be equal; build the last layer with num_labels, or give "
            f"--num_labels {output.shape[1]}."
        )
    if tuple(output.shape) != (count, num_labels):
        raise ConfigError(
            f"The model returned a Tensor of {tuple(output.shape)}: {rule}; flatten or average "
            "the other dimensions."
        )
    return output


@contextmanager
def explained_errors(images: Tensor) -> Iterator[None]:
    """Put what a model's forward fails with into a sentence; what isn't its fault passes.

    Args:
        images: what the model is given.

    Raises:
        ConfigError: the model failed, or a BatchNorm got one value per channel, which has no
            variance.
    """
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        if isinstance(error, PacelineError) or lacks_memory(error) or is_ours(error):
            raise
        if "more than 1 value per channel" in str(error):
            raise ConfigError(
                f"A BatchNorm got only one value per channel in training ({error}), too few for a "
                "variance: give a larger --batch_size, fewer workers, or --sync_bn, which computes "
                "it over the values of all workers."
            ) from error
        raise ConfigError(
            f"The model failed with {described(error)}: correct it; to debug it, "
            f"call the model with torch.zeros{tuple(images.shape)}."
        ) from error


@contextmanager
def explained_memory() -> Iterator[None]:
    """Put a lack of memory into a sentence.

    Raises:
        PacelineError: there is too little memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        asked = _ASKED.search(str(error))
        raise PacelineError(
            f"Out of memory in a step{f', which asked for {asked[1]}' if asked else ''}:"
            " give a smaller --batch_size or --image_size, or spread the batch over more GPUs or "
            "machines."
        ) from error


def _described(output: object) -> str:
    kind = type(output).__name__
    if isinstance(output, dict):
        return f"a {kind} of {', '.join(map(str, list(output)[:5])) or 'nothing'}"
    if isinstance(output, tuple | list):
        return f"a {kind} of {len(output)}"
    return f"a {kind}"
