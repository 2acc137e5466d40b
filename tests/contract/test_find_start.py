"""A start finds the newest valid checkpoint of the run on whichever machine it lies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline.comm.communicator import Communicator
from paceline.config.run import OutputConfig
from paceline.errors import CheckpointError, ConfigError
from paceline.observe.csv_log import COLUMNS, Totals
from paceline.session.resume import checkpoint_transfer
from paceline.session.resume.start import Start, find_start
from paceline.state.checkpoint_files import Checkpoints
from paceline.state.run_folder import next_generation, record_generation, recorded_lineage
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.processes.worlds import run_of, world_of

PIECE = 1000  # bytes
TORN = b"PK\x03\x04 torn"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_transfer, "PIECE", PIECE)


def save(folder: Path, step: int, *, generation: int = 0, epoch: int = 0) -> Path:
    """Write a checkpoint whose weights are its step; it takes several pieces."""
    return Checkpoints(folder, keep=9).write(
        step,
        {
            "model": {"w": torch.full((1000,), float(step))},
            "optimizer": {},
            "position": {
                "number": step,
                "generation": generation,
                "epoch": epoch,
                "step": step,
                "sums": [],
            },
        },
    )


def start(
    folders: Sequence[Path], workers: Sequence[int] = (1, 1), *, resume: str = "auto"
) -> list[Start]:
    """Start a run whose machines have these folders; return each rank's starting point."""
    output = OutputConfig(resume=resume)

    def find(c: Communicator) -> Start:
        group = world_of(workers, c.rank)
        run = run_of(c, group)
        found = find_start(output, folders[group.machine], {}, run)
        assert run.context.world.generation.number == found.generation
        assert run.context.world.generation.start == found.position.number
        return found

    return run_ranks(sum(workers), find)


def weights(found: Start) -> float:
    """Return the value that all weights have."""
    assert found.state is not None
    (value,) = set(found.state["model"]["w"].tolist())
    return float(value)


def test_the_newest_checkpoint_is_on_another_machine_than_rank_0(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    save(folders[0], 4)
    newest = save(folders[1], 8, generation=1)
    found = start(folders, (1, 2))
    assert [weights(one) for one in found] == [8.0] * 3
    assert {one.generation for one in found} == {2}
    text = f"Resuming from {newest} on machine 1 (b): epoch 1, 8 steps done."
    assert [one.notes for one in found] == [(text,)] * 3
    assert [file.name for file in folders[0].glob("checkpoints/*")] == ["step-00000004.pt"]


def test_in_a_shared_folder_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_transfer, "PIECE", 0)  # which no transfer survives
    newest = save(tmp_path, 8)
    found = start([tmp_path, tmp_path], (2, 1))
    assert [weights(one) for one in found] == [8.0] * 3
    assert found[0].notes == (f"Resuming from {newest}: epoch 1, 8 steps done.",)


def test_a_torn_file_is_skipped_and_named_with_its_machine(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    save(folders[0], 4)
    torn = save(folders[1], 8)
    torn.write_bytes(TORN)
    found = start(folders)
    assert [weights(one) for one in found] == [4.0] * 2
    assert found[0].notes[0].startswith(f"On machine 1 (b): {torn}: torn or damaged")


def test_a_copy_whose_content_is_damaged_is_replaced_by_another_machines(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    damaged, other = (save(folder, 8) for folder in folders)
    content = bytearray(other.read_bytes())
    content[content.index(b"\x00\x00\x00\x41" * 8)] ^= 1  # in 8.0, whose checksum stays
    damaged.write_bytes(content)
    assert [weights(one) for one in start(folders)] == [8.0] * 2


def test_where_no_checkpoint_can_be_used_all_ranks_say_so(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    save(folders[1], 8).write_bytes(TORN)
    with pytest.raises(CheckpointError, match=r"No checkpoint of run [ab] \(1 found\) can be used"):
        start(folders)


def test_the_generation_is_recorded_on_every_machine(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    folders[1].mkdir()
    record_generation(folders[1], 5)
    assert {one.generation for one in start(folders[:2])} == {6}
    assert {one.generation for one in start([folders[0], folders[2]])} == {7}
    assert [next_generation(folder) for folder in folders] == [8, 7, 8]
    recorded = [recorded_lineage(folders[machine]) for machine in (0, 2)]
    assert recorded[0] == recorded[1]


def test_another_runs_checkpoint_is_that_of_rank_0s_machine(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    origin = save(tmp_path / "other", 8)
    found = start(folders, resume=str(origin))
    assert [(weights(one), one.origin) for one in found] == [(8.0, str(origin))] * 2
    with pytest.raises(ConfigError, match=r"--resume none\.pt: there is no such file"):
        start(folders, resume="none.pt")


def test_the_logs_totals_are_those_of_the_machine_that_has_them(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    save(folders[1], 8, epoch=2)
    for folder, epochs in zip(folders, (1, 3), strict=True):
        folder.mkdir(exist_ok=True)
        rows = [
            f"5,{5 * n},40,{40 * n},{4 * n},8,0.5,{n - 1},0.1,1,-1" for n in range(1, epochs + 1)
        ]
        lines = ["# Namespace()", ",".join(COLUMNS), *rows, ""]
        (folder / "net_v2_20180102_030405.log").write_text("\n".join(lines))
    expected = Totals(seconds=10.0, samples=80, batches=8)
    assert [one.totals for one in start(folders)] == [expected] * 2
