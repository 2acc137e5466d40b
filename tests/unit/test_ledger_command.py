"""`paceline ledger`: which run is meant, what is told of it, and the status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.ledger import main
from paceline.errors import ConfigError, DataError
from paceline.state.run_folder import RunFolder
from tests.harness.processes.ledger_histories import RunHistory


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two machines under runs/, each with a folder of its own; three epochs, one begun."""
    monkeypatch.chdir(tmp_path)
    return written(tmp_path / "runs", by_member=True)


@pytest.fixture
def earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, by an earlier version."""
    monkeypatch.chdir(tmp_path)
    return written(tmp_path / "runs", by_member=False)


def written(folder: Path, *, by_member: bool) -> Path:
    history = RunHistory(
        samples=1000, batch=64, epochs=3, broken=frozenset({3}), by_member=by_member
    )
    history.start(world=4, start_step=0, end_steps=[17, 18, 17, 17], saved=[16], local=2)
    history.write(folder)
    return folder


def test_a_run_whose_machines_share_no_folder_is_proved_of_both(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs/machine0", "machine1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if "/3" in line] == [
        [*["│", "1/3", "│", "1,000", "│", "999", "│", "1", "│", "0", "│", "0", "│", "1,000│"]],
        [*["│", "2/3", "│", "64", "│", "63", "│", "1", "│", "0", "│", "0", "│", "0│"]],
    ]
    assert lines[-1] == (
        "Exact: each sample was trained exactly once, in 17 of 48 steps, 16 of them committed, "
        "1 more in progress, 2 unreadable samples skipped."
    )


def test_a_machine_that_is_left_out_is_named_and_proved_by_the_other(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["machine0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "Exact: each sample was trained exactly once, in 16 of 48 steps, all committed, 2 more in "
        "progress, 1 unreadable samples skipped, 500 samples proved by other members' lines "
        "alone: inferred from the data order that these recorded.",
        "  Generation 0 has no event file of member 000000000000-2, member 000000000000-3: other "
        "members' lines prove 500 samples, skipped ones included; give the run's folder of each "
        "machine.",
    ]


def test_many_notes_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = RunHistory(samples=10, batch=4, epochs=40)
    for start in range(7):
        history.start(
            world=2, start_step=start, end_steps=[start + 1] * 2, saved=[start + 1], local=1
        )
    history.write(tmp_path)
    assert main([str(tmp_path / "machine0")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("no event file" in line for line in lines) == 5
    assert lines[-1] == "  … and 2 more."


def test_a_machine_that_is_left_out_is_missed_in_an_earlier_run(
    earlier_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["machine0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "Not exact: 500 samples were lost, 0 were duplicated or misplaced." in lines
    assert (
        "  generation 0: It has 4 ranks, but no event file of rank 2, rank 3: give the run's "
        "folder of each machine."
    ) in lines
    assert (
        '  epoch 1/3, step 2/16 and the 13 after it (generation 0, "step": 1): '
        "Positions 96 to 127 were trained by no rank (ranks 2, 3 wrote no line)."
    ) in lines


def test_machines_get_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine0", "machine1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["exact"] is True
    assert (told["done"], told["committed"], told["begun"]) == (17, 16, 18)
    assert told["accounts"][0]["once"] == 999
    assert told["notes"] == []
    assert main(["machine0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["accounts"][0]["substituted"] == 500
    assert len(told["notes"]) == 1


def test_machines_get_json_of_faults(earlier_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine1", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["exact"] is False
    text = told["faults"][0]["text"]
    assert text.startswith("It has 4 ranks, but no event file of rank 0, rank 1")


def test_a_folder_that_is_given_twice_counts_once(run: Path) -> None:
    assert main(["machine0", "runs/machine0", "machine1"]) == 0


def test_another_output_folder_is_looked_into(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.rename(run.parent / "results")
    assert main(["machine0", "machine1", "--output_dir", "results"]) == 0


def test_a_run_that_is_not_there_is_the_callers_mistake(run: Path) -> None:
    (run / "empty").mkdir()
    for name in ("nowhere", "empty"):
        with pytest.raises(
            ConfigError, match=rf"{name} is neither a run folder.*runs, which has machine0"
        ):
            main([name])


def test_no_run_is_the_callers_mistake() -> None:
    with pytest.raises(ConfigError, match="A run folder or run id is required"):
        main([])


@pytest.mark.parametrize("events", [None, "", '{"event": "ru'])
def test_a_run_that_ended_before_it_began_is_told(run: Path, events: str | None) -> None:
    """What is left of a run that was killed while its ranks came together."""
    new = RunFolder(run / "new", shard_id=0)
    new.open({"batch_size": 64})
    new.close()
    if events is not None:
        (run / "new" / "events.rank0.jsonl").write_text(events)
    with pytest.raises(DataError, match=r"the start of a run: .* again with the same command"):
        main(["new"])


def test_a_run_that_was_interrupted_before_its_first_step_is_exact(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = RunHistory(samples=1000, batch=64, epochs=3)
    history.start(world=2, start_step=0, end_steps=[0, 0])
    history.write(run / "new")
    assert main(["new/machine0"]) == 0
    assert capsys.readouterr().out == (
        "Generation 0: after 0 steps; no step counts; 000000000000-0, 000000000000-1\n"
        "Exact: each sample was trained exactly once, in 0 of 48 steps, all committed.\n"
    )


def test_damage_in_the_middle_is_named(run: Path) -> None:
    path = run / "machine0" / "events.000000000000-0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b"\0" * 40 + b"\n", *lines[5:]]))
    with pytest.raises(DataError, match=r"events\.0+-0\.jsonl, line 6: not an event"):
        main(["machine0", "machine1"])


def test_an_unreadable_file_is_named(run: Path) -> None:
    path = run / "machine0" / "events.000000000000-1.jsonl"
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=r"events\.0+-1\.jsonl can't be read \(Is a directory\)"):
        main(["machine0", "machine1"])


def test_many_like_epochs_share_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = RunHistory(samples=10, batch=4, epochs=40)
    history.start(world=1, start_step=0, end_steps=[92])
    history.write(tmp_path)
    assert main([str(tmp_path / "machine0")]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "/40" in line]
    assert [row.split("│")[1].strip() for row in rows] == ["1–30/40", "31/40"]
