"""What a run's folder says of the run: that it has ended, and how often it was started."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster.membership.generation import Ancestor
from paceline.errors import PacelineError
from paceline.state.run_folder import (
    RunFolder,
    is_finished,
    next_generation,
    record_generation,
    record_lineage,
    recorded_lineage,
)

SAME: dict[str, object] = {"seed": 0}
END = '{"event": "end", "generation": 0}\n'


def test_a_run_that_has_finished_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, shard_id=0)
    assert not is_finished(tmp_path)
    folder.finish()
    assert is_finished(tmp_path)


def test_what_machine_0_has_not_confirmed_finishes_the_folder_of_machine_0_alone(
    tmp_path: Path,
) -> None:
    first, second = (RunFolder(tmp_path, shard_id=number) for number in (0, 1))
    assert not first.finished_as(SAME)
    second.finish(confirmed=False)
    assert is_finished(tmp_path)
    assert (first.finished_as(SAME), second.finished_as(SAME)) == (True, False)
    first.finish()
    assert second.finished_as(SAME)


def test_a_run_that_trains_again_is_not_finished(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, shard_id=1)
    for _ in range(2):
        folder.open(SAME)
        assert not is_finished(tmp_path)
        folder.finish(confirmed=False)
        assert folder.close()
        assert is_finished(tmp_path)


@pytest.mark.parametrize(
    ("events", "finished"),
    [("", False), ('{"event": "step"}\n', False), (END, True), (END + '{"event": "run"}\n', False)],
)
def test_an_empty_file_of_an_earlier_version_needs_the_event_of_the_end(
    tmp_path: Path, events: str, finished: bool
) -> None:
    (tmp_path / "finished").touch()
    (tmp_path / "events.rank0.jsonl").write_text(events)
    assert is_finished(tmp_path) == finished


def test_other_content_finishes_nothing(tmp_path: Path) -> None:
    (tmp_path / "finished").write_text("finis")
    (tmp_path / "events.rank0.jsonl").write_text(END)
    assert not is_finished(tmp_path)


def test_generations_are_counted_over_all_starts(tmp_path: Path) -> None:
    assert next_generation(tmp_path) == 0
    record_generation(tmp_path, 0)
    assert next_generation(tmp_path) == 1
    record_generation(tmp_path, 9)  # within that start
    assert next_generation(tmp_path) == 10


@pytest.mark.parametrize("content", ["", "one", "9" * 6000])
def test_a_damaged_number_of_the_last_generation_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation").write_text(content)
    with pytest.raises(PacelineError, match=r"generation is damaged; .*--run_id"):
        next_generation(tmp_path)


def test_the_lineage_of_the_newest_generation_is_recorded(tmp_path: Path) -> None:
    assert recorded_lineage(tmp_path) is None
    lineage = (Ancestor(id="a", start=0), Ancestor(id="b", start=7))
    record_lineage(tmp_path, 3, lineage)
    assert recorded_lineage(tmp_path) == (3, lineage)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"generation": 1}', '{"generation": 1, "lineage": 2}']
)
def test_a_damaged_lineage_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "lineage.json").write_text(content)
    with pytest.raises(PacelineError, match=r"lineage\.json can't be read \(.*restore the file"):
        recorded_lineage(tmp_path)
