"""Shortlist: which of the candidates are worth a trial."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config.world import SyncConfig

SHORTLIST = 4  # candidates of the trials, where times are predicted
MAX_RATIO = 1.15  # of predicted times to the fastest; predictions err by less


def shortlist(candidates: Sequence[SyncConfig], seconds: Sequence[float]) -> list[int]:
    """Return the candidates that are worth a trial by their predicted times, the fastest first.

    They are the fastest; the fastest with another number of connections, whose gain isn't
    predicted; the fastest of another method, since predictions err; and then other bucket sizes.
    What is predicted to take more than `MAX_RATIO` times the fastest one's time is left out, but
    two are always compared. `SHORTLIST` at most.

    Args:
        candidates: the exchanges, two or more; of equal ones the first is the fastest.
        seconds: predicted, one a candidate.
    """
    order = sorted(range(len(candidates)), key=lambda c: seconds[c])
    kinds: dict[object, int] = {}
    for c in order:
        kinds.setdefault((candidates[c].sync, candidates[c].connections), c)
    connections = candidates[order[0]].connections
    limit = MAX_RATIO * seconds[order[0]]
    sizes = [c for c in order if candidates[c].connections == connections]
    found = [c for c in dict.fromkeys([*kinds.values(), *sizes]) if seconds[c] <= limit]
    return found[:SHORTLIST] if len(found) > 1 else order[:2]


def unpredicted(candidates: Sequence[SyncConfig]) -> list[int]:
    """Return the candidates of trials without predictions.

    They are all with the first one's number of connections, and the first one with others.
    """
    first = candidates[0]
    return [
        number
        for number, one in enumerate(candidates)
        if one.connections == first.connections
        or (one.sync, one.bucket_mb) == (first.sync, first.bucket_mb)
    ]
