"""Whoever reads what a command says may stop reading, or never begin."""

from __future__ import annotations

import io
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from paceline.api.exit_handler import ExitHandler
from paceline.cli.streams import prepare_streams
from paceline.cluster.environment import Environment
from paceline.errors import DataError

COMMAND = [sys.executable, "-m", "paceline.cli.main"]
FAILING = """
import sys
from paceline.cli import main

def fail():
    print("so far")
    raise %s

sys.exit(main._guarded(fail))
"""


@pytest.fixture
def unread() -> Iterator[int]:
    """Return a pipe's end that nobody reads from."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("words", ["--help", "--version", "db --help"])
def test_a_reader_who_has_seen_enough_ends_the_command_without_a_word(
    words: str, unread: int
) -> None:
    ended = run([*COMMAND, *words.split()], stdout=unread)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_an_error_that_nobody_reads_ends_with_its_status(unread: int) -> None:
    assert run([*COMMAND, "no-command"], stderr=unread).returncode == 2


FULL = "(No space left on device): free some space on it, then try again."


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        ('OSError(28, "No space left on device")', 1, f"the disk is full {FULL}"),
        ("KeyboardInterrupt", 130, None),
    ],
)
def test_other_ends_are_as_ever_where_nobody_reads_the_output(
    error: str, status: int, said: str | None, unread: int
) -> None:
    ended = run([sys.executable, "-c", FAILING % error], stdout=unread)
    assert (ended.returncode, ended.stderr) == (status, f"paceline: {said}\n" if said else "")


@pytest.mark.parametrize(
    ("words", "closed", "status"),
    [("--help", ">&-", 0), ("db --help", ">&-", 0), ("no-command", "<&- >&- 2>&-", 2)],
)
def test_closed_streams_are_none_of_a_commands_business(
    words: str, closed: str, status: int
) -> None:
    ended = run(["sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, *words.split()])
    assert (ended.returncode, ended.stderr) == (status, "")


def test_output_in_another_encoding_lacks_single_characters_only() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [*COMMAND, "db", "create", "--help"]
    ended = subprocess.run(command, capture_output=True, timeout=60, env=environment, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"FOLDER/<class>/?/<image>" in ended.stdout


def end_without_output() -> None:
    """End as a script whose standard output was closed when it started."""
    os.close(1)
    sys.stdout = None  # type: ignore[assignment]
    ExitHandler(Environment()).at_exit(DataError("record 7 is damaged."))


def test_a_closed_output_is_no_error_at_the_end_of_a_script(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The handler of `paceline.join` ends the process with the script's status, and says why."""
    script = multiprocessing.get_context("fork").Process(target=end_without_output)
    script.start()
    script.join(60)
    assert (script.exitcode, capfd.readouterr().err) == (1, "paceline: record 7 is damaged.\n")


def test_what_is_opened_next_takes_no_closed_streams_number() -> None:
    script = """
import os, sys
from paceline.cli.streams import prepare_streams
prepare_streams()
assert os.open(os.devnull, os.O_RDONLY) > 2
assert all(map(os.get_inheritable, range(3)))
"""
    ended = run(["sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, "-c", script])
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_path_that_is_no_text_is_read_and_written_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = b"lat\xe9in \xff.jpg\n"
    written = io.BytesIO()
    for encoding, other in (("utf-8", "é".encode()), ("ascii", b"?")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(path), encoding="utf-8"))
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding))
        prepare_streams()
        print(sys.stdin.readline(), end="é", flush=True)
        sys.stdout.detach()  # type: ignore[attr-defined]
        assert written.getvalue() == path + other
        written.truncate(0)
        written.seek(0)


def run(command: Sequence[str], **streams: int) -> subprocess.CompletedProcess[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # what is printed waits to be written
    return subprocess.run(command, **pipes, text=True, timeout=60, check=False, env=environment)
