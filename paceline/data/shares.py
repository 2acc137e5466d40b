"""Shares of a global batch: how many samples each rank trains, as pure functions.

    shares   (ranks,) samples of a full batch, by rank: (48, 16)
    divide   a short batch of 10 in these proportions: 7.5 and 2.5, hence (8, 2)

Whole numbers alone decide how a batch is divided, so that all ranks divide it alike.
"""

from __future__ import annotations

from collections.abc import Sequence

_SCALE = 2**40  # of the largest speed, as a whole number


def divide(count: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Divide a batch in proportion to shares, by the method of the largest remainder.

    Args:
        count: number of samples of the batch.
        shares: (ranks,) whole numbers from 0, not all 0.

    Returns:
        (ranks,) numbers of samples, which sum to `count`. Each is its exact part, rounded down or
        up. Of equal remainders, those of the first ranks are rounded up.
    """
    total = sum(shares)
    counts = [count * share // total for share in shares]
    remainders = [count * share % total for share in shares]
    # Of equal remainders the lower rank goes first: all ranks must come to the same division.
    order = sorted(range(len(shares)), key=lambda rank: (-remainders[rank], rank))
    for rank in order[: count - sum(counts)]:
        counts[rank] += 1
    return tuple(counts)


def without_small(counts: Sequence[int], shares: Sequence[int], least: int) -> tuple[int, ...]:
    """Divide a batch anew where a rank has a few samples, but fewer than `least`: it gets none.

    Args:
        counts: (ranks,) samples of each rank.
        shares: (ranks,) the proportions of which `divide` made them.
        least: the smallest number that a rank may have, if it has any.

    Returns:
        (ranks,) numbers of samples with the same sum; of a batch that is smaller than `least`, one
        rank has all.
    """
    left = list(shares)
    counts = tuple(counts)
    while sum(map(bool, counts)) > 1:
        small = [rank for rank, count in enumerate(counts) if 0 < count < least]
        if not small:
            break
        # One rank at a time, because its samples may lift the others above the least.
        left[small[-1]] = 0
        counts = divide(sum(counts), left)
    return counts


def balanced(count: int, times: Sequence[float], least: int = 0) -> tuple[int, ...]:
    """Return the shares that give all ranks equal computation times.

    Args:
        count: number of samples of a full batch; at least `least` for each rank.
        times: (ranks,) time a sample, above 0, in any one unit.
        least: the smallest share.

    Returns:
        (ranks,) numbers of samples, which sum to `count`.
    """
    fastest = min(times)
    # Whole numbers from here on: sums of floats depend on their order, and the ranks must agree.
    speeds = [max(1, round(_SCALE * fastest / each)) for each in times]
    shares = divide(count, speeds)
    while raised := [r for r, share in enumerate(shares) if speeds[r] and share < least]:
        for rank in raised:
            speeds[rank] = 0  # it gets the least share, and the others divide the rest
        fixed = speeds.count(0)
        rest = iter(divide(count - fixed * least, [each for each in speeds if each]))
        shares = tuple(next(rest) if each else least for each in speeds)
    return shares
