"""What exchanges that aren't exact would gain on a slow link, by prediction: a note for the user.

`--sync auto` never selects one of them: a lossy wire rounds gradients, and averaging lets the
workers' weights differ between merges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.config.average import default_delay
from paceline.config.world import SyncConfig
from paceline.errors import Message

ROUND = 50  # steps between merges
_DELAY = default_delay(((0, ROUND),), fragments=1)  # steps while a merge travels
_SLOW = 0.7  # of a step computes, or more: the link is fast enough
_GAIN = 0.9  # of the seconds, or less: worth a word


def inexact_note(
    fastest: SyncConfig,
    seconds: float,
    compute: float,
    predict: Callable[[SyncConfig], float],
    merge_seconds: float,
) -> Message | None:
    """Return a sentence with what a lossy wire and averaging would gain; None: too little.

    Args:
        fastest: the exchange that is predicted to be the fastest.
        seconds: those of a step with it.
        compute: seconds of a step that exchanges nothing.
        predict: returns the predicted seconds of a step with another exchange.
        merge_seconds: those for which the bytes of one merge occupy the link.
    """
    if compute >= _SLOW * seconds or merge_seconds < (1 - _SLOW) * seconds:
        return None  # in the second case the exchange's own work is what takes long
    options = []
    if fastest.wire == "fp32":
        wire = predict(replace(fastest, sync="notified", wire="int8"))
        options.append(("{--sync} notified {--wire} int8", wire))
    average = compute + max(0.0, merge_seconds - _DELAY * compute) / ROUND
    options.append((f"{{--sync}} average {{--average_every}} {ROUND}", average))
    gains = ", ".join(f"{name} {1000 * s:.3g} ms" for name, s in options if s <= _GAIN * seconds)
    if not gains:
        return None
    return Message(
        f"the link is slow: of a step of {1000 * seconds:.3g} ms, {1000 * compute:.3g} ms are "
        f"computation, by prediction. Faster, but not exact: {gains} a step."
    )
