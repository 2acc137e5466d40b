"""The benchmark of the exchange makes the networks that it speaks of, and leaves none behind."""

from __future__ import annotations

import os
import re
import signal

import psutil

from tests.harness.documents.benchmark_runs import (
    INTERVAL,
    LIMIT,
    SAME,
    benchmark,
    carried,
    need_shaped_links,
    printed,
    table,
)

SMALL = ("--mb", "2", "--steps", "1", "--rate", "100mbit")


def namespace_of(process: psutil.Process) -> str:
    return os.readlink(f"/proc/{process.pid}/ns/net")


def test_all_rows_stand_beside_a_stream_at_the_ports_rate_and_gloo_s_best() -> None:
    need_shaped_links()
    out = printed("exchange.py", *SMALL, "--rounds", "2", "--worlds", "2x2", "--markdown")
    assert re.search(r"^2 machines of 2 ranks:$", out, re.MULTILINE)
    (rate,) = carried(out)
    assert rate <= 0.1 * 1.4  # at each of two ports a burst of 256 kB goes free, of 2 MB
    cells = table(out)
    assert list(cells) == ["line", "gloo", "gloo:8", "gloo:25", "notified", "notified:8"]
    for row, (milliseconds, of_line, of_gloo) in cells.items():
        assert milliseconds.isdecimal()
        assert INTERVAL.fullmatch(of_line)
        assert INTERVAL.fullmatch(of_gloo) or row == "line"
    assert cells["line"][1:] == [SAME, ""]
    assert SAME in {cells[row][2] for row in ("gloo", "gloo:8", "gloo:25")}


def test_of_a_killed_benchmark_neither_process_nor_namespace_is_left() -> None:
    need_shaped_links()
    rows = ("--worlds", "2", "--rows", "gloo", "--rounds", "1000000")
    with benchmark("exchange.py", *SMALL, *rows) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "2 machines of 1 rank:\n":  # the ranks are at work
            assert process.poll() is None
        family = psutil.Process(process.pid).children(recursive=True)
        made = {namespace_of(child) for child in family} - {namespace_of(psutil.Process())}
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=LIMIT)
    assert len(made) == 3  # two machines and the switch
    assert not psutil.wait_procs(family, timeout=LIMIT)[1]


def test_a_rate_that_tc_doesn_t_know_is_a_sentence() -> None:
    out = printed("exchange.py", "--rate", "1furlong", "--worlds", "2")
    assert re.search(r"^2 machines of 1 rank: not measured, as .*\.$", out, re.MULTILINE)
