"""The benchmark of parameter servers has all rows, in its table and in its file."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness.documents.benchmark_runs import INTERVAL, SAME, need_shaped_links, printed, table

SMALL = ("--mb", "2", "--rates", "200mbit", "--small_steps", "20", "--markdown")


def test_servers_stand_beside_a_stream_a_peer_and_ddp_and_their_memory_is_printed(
    tmp_path: Path,
) -> None:
    need_shaped_links()
    out = printed("servers.py", "--quick", *SMALL, "--json", str(tmp_path / "found.json"))
    cells = table(out)
    assert list(cells) == ["line", "server", "rpc", "ddp"]
    assert cells["line"][2] == SAME
    for row, (milliseconds, rate, share) in cells.items():
        assert milliseconds.isdecimal()
        assert bool(rate) == (row != "ddp")
        assert INTERVAL.fullmatch(share)
    assert "a server of 2 workers, 20 steps of 2.1 MB:" in out
    *rows, memory = json.loads((tmp_path / "found.json").read_text())
    for row in rows:
        if row["row"] != "ddp":  # at a rate that neither stream nor server exceeds by a burst
            assert 0 < row["gbit"] <= 0.2 * 1.4
    assert len(memory["kib"]) == 20
