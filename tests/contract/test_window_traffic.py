"""A notification never precedes its data; none is lost, none doubled; nothing else is written.

Random puts have sizes from nothing to several frames, any offset, any urgency, and many are under
way at once. The receiver derives from the same seed what must arrive, and compares every byte.
"""

from __future__ import annotations

from math import ceil

import pytest

from tests.harness.network.window_kinds import KINDS, Make, kinds, run_windows
from tests.harness.network.window_traffic import Traffic

SMALL = [40] * 6  # bytes of each lane
MIXED = [300, 40, 5000, 700_000]  # the last has puts of several frames


def traffic(kind: str, world_size: int, lanes: list[int], operations: int) -> int:
    """Let windows of a kind exchange at least so many puts and answers; return how many came."""
    size, others = world_size * sum(lanes), world_size - 1
    rounds = ceil(operations / (2 * len(lanes) * world_size * others))
    make: Make = KINDS[kind](world_size, size, 2 * len(lanes))
    came = run_windows(make, world_size, lambda window: Traffic(window, lanes, rounds, 1).run())
    assert came == [2 * rounds * len(lanes) * others] * world_size
    return sum(came)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_many_random_operations_between_threads(world_size: int) -> None:
    assert traffic("inprocess", world_size, SMALL, 20_000) >= 20_000


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", kinds("inprocess"))
def test_ten_thousand_random_operations(kind: str, world_size: int) -> None:
    assert traffic(kind, world_size, MIXED, 2_500) >= 2_500
