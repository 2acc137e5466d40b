"""The rank that held others back in an epoch: by the ranks' own times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.run.straggler import Straggler, straggler_of


@pytest.mark.parametrize(
    ("own", "seconds", "expected"),
    [
        ([4.0, 12.0], 12.5, Straggler(1, 8.0, 8.0 / 12.5)),
        ([2.0, 1.0, 1.5, 8.0], 10.0, Straggler(3, 6.5, 0.65)),
        ([9.0, 9.0, 1.0], 10.0, Straggler(0, 4.0, 0.4)),  # the other slow one didn't wait for it
        ([9.0, 9.4], 10.0, None),
        ([9.0], 10.0, None),
        ([0.5, 1.4], 2.0, None),  # by chance
    ],
)
def test_the_straggler_is_the_rank_for_which_others_waited(
    own: Sequence[float], seconds: float, expected: Straggler | None
) -> None:
    assert straggler_of(own, seconds) == expected
