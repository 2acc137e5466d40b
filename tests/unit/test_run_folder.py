"""What a run's folder says of the run: active or ended, and how often it was started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError, PacelineError
from paceline.state.run_folder import RunFolder, is_finished, next_generation, record_generation

END = '{"event": "end", "generation": 0}\n'


def test_a_run_that_has_finished_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, shard_id=0)
    assert not is_finished(tmp_path)
    folder.finish()
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
    assert [next_generation(tmp_path), next_generation(tmp_path)] == [0, 1]
    assert next_generation(tmp_path, at_least=7) == 7
    record_generation(tmp_path, 9)  # within that start
    assert next_generation(tmp_path, at_least=8) == 10


@pytest.mark.parametrize("content", ["", "one", "9" * 6000])
def test_a_damaged_number_of_the_last_generation_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation").write_text(content)
    with pytest.raises(PacelineError, match=r"generation is damaged; .*--run_id"):
        next_generation(tmp_path)


LOCKER = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("locked", flush=True)
sys.stdin.read()
"""


def locker(folder: Path) -> subprocess.Popen[str]:
    """Start another process, which takes the folder's lock until its input ends, or fails."""
    command = [sys.executable, "-I", "-S", "-c", LOCKER, str(folder / ".alive.0")]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_folder_is_locked_from_open_to_close(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", shard_id=0)
    folder.close()  # it has no lock yet
    folder.open({"seed": 0})
    _, error = locker(folder.path).communicate()
    assert "BlockingIOError" in error
    folder.close()
    assert not (folder.path / ".alive.0").exists()
    folder.close()


def test_a_folder_that_another_process_has_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, shard_id=0)
    with locker(tmp_path) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        for take in (folder.check, folder.open):
            with pytest.raises(ConfigError, match="this run is active on this machine"):
                take({"seed": 0})
        other.communicate("")
    folder.check({"seed": 0})  # what a dead start left
    assert not (tmp_path / ".alive.0").exists()
    folder.open({"seed": 0})
    folder.close()
