"""How many processes decode the images of a command."""

from __future__ import annotations

from paceline.config.data import MAX_DECODE_WORKERS
from paceline.data.decoding.usable_cores import usable_cores

_FEW = 200  # images that one thread has decoded before processes would have begun


def decode_processes(images: int, given: int | None) -> int:
    """Return a number of decode processes, beside a thread of this process.

    Args:
        images: how many there are to decode.
        given: the number that the user gave; None: one a core but one, none for few images.
    """
    if given is not None:
        return given
    return 0 if images < _FEW else min(usable_cores() - 1, MAX_DECODE_WORKERS)
