"""A run's folder belongs to one run of one configuration at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.state.run_folder import RunFolder, choose_run_id

HOLD = """
import sys
from pathlib import Path
from paceline.state.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), shard_id=0)
folder.open({"batch_size": 4})
print("held", flush=True)
sys.stdin.read()
"""


def test_the_same_configuration_may_open_a_finished_run_again(tmp_path: Path) -> None:
    for _ in range(2):
        folder = RunFolder(tmp_path / "r", shard_id=0)
        folder.open({"batch_size": 4, "mean": (1.0, 2.0)})
        folder.close()
    assert (tmp_path / "r" / "config.toml").read_text().startswith("batch_size = 4")


def test_another_configuration_is_refused_with_both_values(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r", shard_id=0)
    folder.open({"batch_size": 4})
    folder.close()
    with pytest.raises(
        ConfigError, match=r"started with --batch_size 4, but --batch_size is now 5"
    ):
        RunFolder(tmp_path / "r", shard_id=0).open({"batch_size": 5})


def test_a_live_run_is_refused_and_a_killed_one_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "r")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="this run is active on this machine"):
            RunFolder(tmp_path / "r", shard_id=0).open({"batch_size": 4})
        holder.kill()
    RunFolder(tmp_path / "r", shard_id=0).open({"batch_size": 4})


def test_a_folder_that_cannot_be_made_is_the_callers_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output_dir: .*can't be written"):
        RunFolder(tmp_path / "file" / "r", shard_id=0).open({})


def test_the_same_command_takes_the_unfinished_run_or_the_next_one(tmp_path: Path) -> None:
    assert choose_run_id(tmp_path, "abc", anew=False) == "abc-1"
    first = RunFolder(tmp_path / "abc-1", shard_id=0)
    first.open({})
    assert choose_run_id(tmp_path, "abc", anew=False) == "abc-1"
    assert choose_run_id(tmp_path, "abc", anew=True) == "abc-2"
    first.finish()
    assert choose_run_id(tmp_path, "abc", anew=False) == "abc-2"


def test_a_run_that_has_begun_cannot_start_anew(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r", shard_id=0)
    folder.check({}, anew=True)
    folder.open({"batch_size": 4})
    folder.close()
    with pytest.raises(ConfigError, match=r"--resume no: run r already exists"):
        RunFolder(tmp_path / "r", shard_id=0).check({"batch_size": 4}, anew=True)
