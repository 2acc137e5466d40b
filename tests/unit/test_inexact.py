"""The note on a slow link: what a lossy wire and averaging would gain."""

from __future__ import annotations

import pytest

from paceline.config.world import SyncConfig
from paceline.run.autotune.inexact import inexact_note

PUTS = SyncConfig(sync="notified", bucket_mb=4)


@pytest.mark.parametrize(
    ("fastest", "seconds", "compute", "int8", "merge", "expected"),
    [
        (PUTS, 0.9, 0.3, 0.4, 0.8, ("wire int8 400 ms", "average_every 50 300 ms")),
        (SyncConfig(sync="allreduce"), 0.9, 0.3, 0.85, 20.0, ("average_every 50 628 ms",)),
        (SyncConfig(sync="notified", wire="bf16"), 0.9, 0.3, 0.1, 0.8, ("every 50 300 ms",)),
        (PUTS, 0.9, 0.3, 0.85, 44.0, ()),  # neither gains a tenth
        (PUTS, 0.4, 0.3, 0.3, 0.2, ()),  # most of a step computes
        (PUTS, 0.9, 0.3, 0.4, 0.1, ()),  # it isn't the link that takes long
    ],
)
def test_only_what_gains_is_named(
    fastest: SyncConfig,
    seconds: float,
    compute: float,
    int8: float,
    merge: float,
    expected: tuple[str, ...],
) -> None:
    def predict(config: SyncConfig) -> float:
        assert (config.sync, config.wire) == ("notified", "int8")
        return int8

    note = inexact_note(fastest, seconds, compute, predict, merge)
    text = "" if note is None else note.render(lambda flag: flag)
    assert (note is None) is not bool(expected)
    assert text.count(" ms") == len(expected) + 2 * bool(expected)
    for gain in expected:
        assert gain in text
