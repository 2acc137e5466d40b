"""Benchmarks of a step and its parts compare equal work, print tables and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from paceline.comm.communicator import Communicator
from paceline.wiring.candidates import CANDIDATES, CONNECTIONS
from tests.harness.documents.benchmark_runs import (
    BENCHMARKS,
    INTERVAL,
    LIMIT,
    SAME,
    benchmark,
    load,
    printed,
    table,
)
from tests.harness.processes.gloo_processes import spawn

SMALL = ("--model", "resnet20", "--image-size", "8", "--batch", "2", "--links", "loopback")
EXACT = ("ddp:1", "allreduce", "allreduce:0.1", "notified:0.1")


def trained(
    communicator: Communicator, folder: str, model: str, rows: Sequence[str]
) -> dict[str, list[Tensor]]:
    """Train by each row's method for three steps; return the weights."""
    sys.path.insert(0, str(BENCHMARKS))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import variants

    setting = variants.Setting(
        rank=communicator.rank,
        ranks=communicator.world_size,
        address="127.0.0.1",
        ranks_by_address={"127.0.0.1": communicator.world_size},
        store=f"{folder}/store",
        rows=[],
        model=model,
        image_size=8,
        batch=2,
        dtype="float",
    )
    weights = {}
    for row in rows:
        variant = variants.make(setting, row)
        for _ in range(3):
            variant.step()
        variant.finish()
        weights[row] = [p.detach().clone() for p in variant.result()]
    return weights


def test_ddp_and_paceline_train_the_same_and_no_exchange_something_else(tmp_path: Path) -> None:
    rows = ("none", "floor-bf16", *EXACT, "ddp-bf16:1")
    first, second = spawn(2, trained, str(tmp_path), "resnet20", rows)
    for row in EXACT:
        torch.testing.assert_close(first[row], first["ddp:1"])
        torch.testing.assert_close(second[row], first["ddp:1"])
    torch.testing.assert_close(first["floor-bf16"], first["none"])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(first["none"], second["none"])
    rounded, error = first["ddp-bf16:1"], {"rtol": 2**-8, "atol": 1e-3}
    torch.testing.assert_close(rounded, second["ddp-bf16:1"], rtol=0, atol=0)
    torch.testing.assert_close(rounded, first["ddp:1"], **error)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(rounded, first["ddp:1"])


def test_ddp_and_paceline_train_a_model_of_text_the_same(tmp_path: Path) -> None:
    first, second = spawn(2, trained, str(tmp_path), "gpt", ("none", "ddp:25", "notified"))
    for ranks_weights in (first, second):
        torch.testing.assert_close(ranks_weights["notified"], first["ddp:25"])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(first["none"], second["none"])


def test_a_table_has_a_line_a_row_and_each_row_s_speed_against_the_others() -> None:
    cells = table(printed("step.py", *SMALL, "--rounds", "2", "--steps", "1", "--markdown"))
    ddp, ddp_bf16 = [[f"{method}:{mb}" for mb in (1, 4, 25)] for method in ("ddp", "ddp-bf16")]
    floors = ["floor", "floor-bf16", "floor-int8"]
    ours = ["allreduce", "notified", "notified-sharded", "notified-bf16", "notified-int8"]
    assert list(cells) == ["none", *floors, *ddp, *ddp_bf16, *ours]
    for milliseconds, *speeds in cells.values():
        assert milliseconds.isdecimal()
        assert len(speeds) == 4
        assert all(INTERVAL.fullmatch(speed) for speed in speeds)
    assert SAME in {cells[row][1] for row in ddp}
    assert SAME in {cells[row][2] for row in ddp_bf16}
    assert [cells[row][3] for row in floors] == [SAME] * 3
    assert cells["none"][4] == SAME


def test_ctrl_c_in_the_middle_leaves_no_process() -> None:
    with benchmark("step.py", *SMALL, "--rounds", "1000000") as process:
        assert process.stdout is not None
        while process.stdout.readline() != "loopback:\n":  # the ranks are at work
            assert process.poll() is None
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT)
    assert len(ranks) == 2
    assert process.returncode == 130
    assert not err
    assert not psutil.wait_procs(ranks, timeout=LIMIT)[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "--rows horovod",
            "'horovod' is none of none, floor, floor-bf16, floor-int8, line, ddp, ddp-bf16",
        ),
        ("--rows ddp:0", "0 MiB is no size of a bucket"),
        ("--rows ddp:8x2", "ddp:8x2: a number of connections is for notified only"),
        ("--against /proc", "/proc is no checkout of Paceline: no paceline/__init__.py"),
        ("--against . --rounds 9 --most-rounds 8", "--rounds 9 is more than --most-rounds 8"),
        ("--against . --restart-every 0", "0 is no number of rounds: give 1 or more"),
        ("--model gpt --image-size 8", "--image-size 8: gpt reads text, no images"),
        ("--model vgg16 --image-size 31", "--image-size 31: vgg16 takes 32 or more"),
    ],
)
def test_an_argument_that_means_nothing_is_refused(
    arguments: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(BENCHMARKS.parent)
    monkeypatch.setattr(sys, "argv", ["step.py", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        load("step").main()
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err


def test_what_auto_chooses_is_said_and_stands_beside_each_fixed_choice() -> None:
    with benchmark("auto.py", *SMALL, "--quick", "--markdown") as process:
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert err.count("Pin this choice with --sync ") == 1  # by rank 0
    cells = table(out)
    fixed = [f"{sync}:{size:g}" for sync, size in CANDIDATES["cpu"]]
    more = [f"{row}x{CONNECTIONS}" for row in fixed if row.startswith("notified")]
    assert list(cells) == ["auto", *fixed, *more]
    assert all(INTERVAL.fullmatch(ratio) for _, ratio, _ in cells.values())
    assert [mark for *_, mark in cells.values()].count("fastest") == 1


def test_the_wires_table_has_a_line_for_each_of_their_methods() -> None:
    title, _, _, *lines = printed("wires.py", "--quick").splitlines()
    assert title.startswith("256000 values, one thread")
    found = {line[:22].strip(): len(re.findall(r" \d+\.\d\d", line)) for line in lines}
    wires = ("bf16", "int8", "int4", "topk:0.02")
    methods = {f"{wire} {method}" for wire in wires for method in ("encode", "decode", "add")}
    sums = {"sum of 1", "sum of 2", "sum of 4"}
    past_caches = {"sum of 1 past caches", "sum of 2 past caches"}
    reductions = {f"{wire} reduce" for wire in wires}
    assert set(found) == methods | reductions | sums | past_caches
    alone = {name for name, columns in found.items() if columns == 2}  # torch has nothing like it
    others = {name for name in methods if not name.startswith("bf16")}
    assert alone == {*others, *reductions, "sum of 4", *past_caches}
    assert set(found.values()) == {2, 4}


def test_a_checkpoint_s_cost_is_added_up(tmp_path: Path) -> None:
    small = (*SMALL[:6], "--steps", "2", "--checkpoints", "1", "--folder", str(tmp_path))
    spans = re.findall(r"(.+?)  +(-?[\d.]+) \(", printed("checkpoint.py", *small))
    found = {name: float(value) for name, value in spans}
    assert found["stall, ms"] > 0
    share = found["cost, ms"] / 60_000 * 100
    assert found["cost at one a minute, %"] == pytest.approx(share, abs=0.006)
    assert not list(tmp_path.iterdir())


def test_the_floor_stands_between_the_computation_and_the_barrier_and_beside_a_row() -> None:
    quick = ("--quick", "--rows", "notified:0.1", "--mb", "0.25", "--markdown")
    cells = table(printed("floor.py", *SMALL, *quick))
    simulated = ["no exchange", "floor", "buckets:0.25", "barrier", "no overlap"]
    assert list(cells) == [*simulated, "notified:0.1"]
    compute, floor, buckets, barrier, apart, row = (float(ms) for ms, *_ in cells.values())
    assert 0 < compute <= floor <= min(buckets, barrier) <= max(buckets, barrier) <= apart
    assert cells["floor"][1] == cells["barrier"][2] == cells["no overlap"][3] == "1.000"
    assert float(cells["notified:0.1"][1]) == pytest.approx(floor / row, rel=0.05)


def test_defaults_run_from_the_first_step_beside_ddp() -> None:
    cells = table(printed("defaults.py", *SMALL, "--quick", "--markdown"))
    rows = {name.partition(":")[0]: name for name in cells if "ddp" in name}
    assert list(cells) == ["early: default", rows["early"], "later: default", rows["later"]]
    interval = re.compile(r"\d\.\d{3} \(\d\.\d{3} to \d\.\d{3}\)")
    for name, (ms, ratio, share, barrier) in cells.items():
        assert float(ms) > 0
        assert bool(interval.fullmatch(ratio)) is ("default" in name)
        assert float(share) > 0
        assert float(barrier) >= 1
