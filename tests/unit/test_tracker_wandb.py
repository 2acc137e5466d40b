"""W&B's offline files of a run, read back; `make trackers` installs W&B for it."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.library.tracked_runs import EPOCHS, STEPS, Curves, Killed, train

pytest.importorskip("wandb")

ALL = set(range(EPOCHS * STEPS))
BLOCK, HEAD = 1 << 15, struct.Struct("<IHB")  # checksum, length, kind


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def records(path: Path) -> list[Any]:
    """Read a file of W&B: a header of 7 bytes, then LevelDB's log of blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, found, place, joined = path.read_bytes(), [], 7, b""
    while place < len(data):
        left = BLOCK - place % BLOCK
        if left < HEAD.size:
            place += left
            continue
        _, length, kind = HEAD.unpack_from(data, place)  # 1 whole, 2 first, 3 middle, 4 last
        place += HEAD.size + length
        joined += data[place - length : place]
        if kind in (1, 4):
            found.append(Record.FromString(joined))
            joined = b""
    return found


def curves(folder: Path) -> Curves:
    """Return all values of all W&B runs in a run's folder."""
    found: Curves = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            row = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }
            for name in row.keys() - {"step"}:
                if not name.startswith("_"):
                    found.setdefault(name, {})[row["step"]] = row[name]
    return found


def test_a_resumed_run_continues_the_same_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--redis_url", "redis://:SECRET@host:1"])
    with pytest.raises(Killed):
        train(tmp_path, "wandb", die_before=8, snapshots=False)
    logged = train(tmp_path, "wandb", snapshots=False)
    folders = sorted(tmp_path.glob("wandb/offline-run-*"))
    known = (tmp_path / "wandb.id").read_text().strip()
    assert len(folders) == 2
    assert all(folder.name.endswith(f"-{known}") for folder in folders)
    found = curves(tmp_path)
    assert set(found["loss"]) == ALL
    assert {step: found["loss"][step] for step in logged["loss"]} == pytest.approx(logged["loss"])
    assert set(found["step/exposed_ms"]) == ALL
    secret = [
        path for path in tmp_path.rglob("*") if path.is_file() if b"SECRET" in path.read_bytes()
    ]
    assert not secret
    runs = [record.run for path in folders for record in records(next(path.glob("*.wandb")))]
    assert {run.display_name for run in runs if run.run_id} == {tmp_path.name}


def test_a_run_without_a_key_is_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    import wandb

    wandb.teardown()
    train(tmp_path / "run", "wandb")
    wandb.teardown()
    assert (
        "paceline: wandb failed, and the run continues without it: no API key; run `wandb login`, "
        "or set WANDB_MODE=offline.\n"
    ) in capsys.readouterr().err
