"""What a survivor has after 30 lost peers is what it had after a few."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster.membership import membership
from tests.harness.equivalence.memory_growth import Usage
from tests.harness.membership.replaced_peers import ReplacedPeers

FEW, MANY = 6, 30
SYNCS = {
    "allreduce": ("--sync", "allreduce"),
    "sharded": ("--sync", "notified", "--update", "sharded", "--bucket_mb", "0.01"),
}


@pytest.mark.parametrize("sync", SYNCS)
def test_a_survivor_of_30_losses_has_what_it_had_after_a_few(
    sync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_FORGET_S", 0.0)  # connections to lost members
    usage: dict[int, Usage] = {}

    def look(number: int) -> None:
        if True:
            usage[number] = Usage.now()

    ReplacedPeers(tmp_path, SYNCS[sync], MANY, look).train()
    print(*usage.values(), sep="\n")
    few, many = usage[FEW], usage[MANY]
    assert (many.files, many.threads) == (few.files, few.threads)
    assert many.mappings == few.mappings
    assert many.memory < 1.02 * few.memory
