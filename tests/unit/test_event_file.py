"""The event file: whole lines at once, scalars only, and a torn last line does no harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import DataError, PeerLost
from paceline.observe.event_file import EventFile, find_event_files, read_events
from tests.harness.membership.given_membership import GivenMembership

MEMBER = "0123456789ab-1"
STEP: dict[str, Any] = {
    "generation": 0,
    "step": 12,
    "epoch": 0,
    "first": 384,
    "last": 400,
    "cuts": [368, 384, 400],
    "skipped": 1,
}

EPOCH: dict[str, Any] = {
    "epoch": 0,
    "seconds": 4.0,
    "samples": 1280,
    "batches": 10,
    "loss": 1.5,
    "accuracy": 0.25,
    "learning_rate": 0.1,
    "test_accuracy": None,
    "top5": None,
}


def test_a_step_is_one_line_of_json(tmp_path: Path) -> None:
    events = EventFile(tmp_path, MEMBER)
    events.event("step", **STEP)
    events.close()
    assert (tmp_path / "events.0123456789ab-1.jsonl").read_text() == (
        '{"event": "step", "generation": 0, "step": 12, "epoch": 0, "first": 384, "last": 400, '
        '"cuts": [368, 384, 400], "skipped": 1}\n'
    )


def test_a_line_is_in_the_file_before_it_is_closed(tmp_path: Path) -> None:
    events = EventFile(tmp_path, MEMBER)
    events.event("step", **STEP)
    assert list(read_events(events.path)) == [{"event": "step", **STEP}]
    events.close()


def test_a_loss_that_is_still_being_computed_is_neither_read_nor_written(tmp_path: Path) -> None:
    def unread() -> float:
        raise AssertionError("read")

    events = EventFile(tmp_path, MEMBER)
    events.event("step", **STEP, loss=unread, accuracy=torch.tensor(0.5), samples=16)
    events.event("evaluate", step=0, steps=3)
    events.close()
    assert list(read_events(events.path)) == [{"event": "step", **STEP}]


def test_a_loss_that_is_no_number_is_null_in_json(tmp_path: Path) -> None:
    events = EventFile(tmp_path, MEMBER)
    events.event("epoch", **{**EPOCH, "loss": float("nan"), "accuracy": float("inf")})
    events.close()
    line = json.loads(events.path.read_text(), parse_constant=pytest.fail)
    assert line == {"event": "epoch", **EPOCH, "loss": None, "accuracy": None}


def test_a_result_is_checked_when_its_line_is_made_and_nothing_else_is(tmp_path: Path) -> None:
    asked: list[int] = []

    def refuse() -> None:
        asked.append(1)
        raise PeerLost("outside")

    events = EventFile(tmp_path, MEMBER, GivenMembership(require_member=refuse))
    with pytest.raises(TypeError):
        events.event("step", **{**STEP, "cuts": object()})
    assert asked == []
    saved = {"generation": 0, "step": 12, "path": "step-00000012.pt"}
    results = {"step": STEP, "epoch": EPOCH, "checkpoint": {**saved, "in_step": True}}
    for name, fields in results.items():
        with pytest.raises(PeerLost):
            events.event(name, **fields)
    assert len(asked) == 3
    assert events.path.read_text() == ""
    events.event("checkpoint", **saved)  # a losing side's
    events.close()
    assert list(read_events(events.path)) == [{"event": "checkpoint", **saved}]


@pytest.mark.parametrize("missing", STEP)
def test_a_step_without_its_place_in_the_order_is_refused(tmp_path: Path, missing: str) -> None:
    events = EventFile(tmp_path, MEMBER)
    with pytest.raises(KeyError, match=missing):
        events.event("step", **{key: value for key, value in STEP.items() if key != missing})
    events.close()


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "events.rank0.jsonl"
    path.write_bytes(b'{"event": "step"}\n{"event": "st')
    assert list(read_events(path)) == [{"event": "step"}]


def test_the_files_of_the_first_ranks_come_first(tmp_path: Path) -> None:
    names = ["rank0", "rank10", "rank9", "0f-0", "0f-10", "0f-9"]
    for name in (*names, "0f-x", "0f"):
        (tmp_path / f"events.{name}.jsonl").touch()
    found = find_event_files(tmp_path, tmp_path / "nowhere")
    assert [member for member, _ in found] == [
        *("member 0f-0", "rank 0", "member 0f-9", "rank 9", "member 0f-10", "rank 10")
    ]
    assert {path.name for _, path in found} == {f"events.{name}.jsonl" for name in names}


@pytest.mark.parametrize("damage", [b'{"event": "st', b"\xff\xfe", b"12", b""])
def test_damage_elsewhere_is_an_error_with_file_and_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "events.rank0.jsonl"
    path.write_bytes(b'{"event": "step"}\n' + damage + b'\n{"event": "step"}\n')
    with pytest.raises(DataError, match=r"events\.rank0\.jsonl, line 2"):
        list(read_events(path))
