"""A machine's acceptor record: several processes change it, and are killed while they do."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pytest

from paceline.cluster.membership import acceptor_record
from paceline.cluster.membership.acceptor_record import AcceptorRecord, RecordFull
from paceline.errors import CommError, CommTimeout

_KILLS = 40
_LINE = "x" * 20_000  # long enough that a kill often comes in the middle of it


@pytest.fixture
def record() -> Iterator[AcceptorRecord]:
    made = AcceptorRecord.make()
    yield made
    made.close()


def follow(path: str) -> AcceptorRecord:
    return AcceptorRecord.open(path, limit=0.1)


def count_up(record: AcceptorRecord) -> None:
    """Make the text a number and a long line that ends with it, one more than before."""

    def change(text: str) -> tuple[str, None]:
        number = int(text.partition(" ")[0] or 0) + 1
        return f"{number} {_LINE}{number}", None

    record.update(change)


def number_of(record: AcceptorRecord) -> int:
    number, _, line = record.read().partition(" ")
    assert line == f"{_LINE}{number}"
    return int(number)


@contextmanager
def forked(function: Callable[[], None]) -> Iterator[int]:
    """Call a function in a forked process, which is killed at the block's end; yields its id."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            function()
            os._exit(0)
        os._exit(1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_all_processes_see_what_one_of_them_writes(record: AcceptorRecord) -> None:
    other = follow(record.path)
    assert (record.read(), record.version) == ("", 0)
    assert record.update(lambda text: (text + "é", len(text))) == 0
    assert (other.read(), other.version) == ("é", 1)
    assert other.update(lambda text: ("b" * 100_000, text)) == "é"
    assert record.read() == "b" * 100_000
    assert record.update(lambda text: (text, "read")) == "read"
    assert record.version == 2
    other.close()


def test_a_text_that_is_too_long_leaves_the_old_one(record: AcceptorRecord) -> None:
    record.update(lambda text: ("x" * record.capacity, None))
    with pytest.raises(RecordFull, match=r"holds 522,216 bytes, and 522,217 bytes were to be"):
        record.update(lambda text: (text + "y", None))
    assert record.read() == "x" * record.capacity
    record.update(lambda text: ("short", None))
    assert record.read() == "short"


def test_a_change_that_fails_leaves_the_text_and_the_lock(record: AcceptorRecord) -> None:
    def fail(text: str) -> tuple[str, None]:
        raise RuntimeError("in the rules")

    record.update(lambda text: ("old", None))
    with pytest.raises(RuntimeError, match="in the rules"):
        record.update(fail)
    other = follow(record.path)
    assert other.update(lambda text: ("new", text)) == "old"
    other.close()


def test_an_update_waits_for_another_description_within_its_limit(record: AcceptorRecord) -> None:
    other = follow(record.path)

    def change(text: str) -> tuple[str, None]:
        with pytest.raises(CommTimeout, match=r"Another process of this machine .* 0.1 s"):
            other.update(lambda text: ("other", None))
        assert other.read() == ""  # a reader waits for no lock
        return "new", None

    record.update(change)
    assert other.update(lambda text: (text, text)) == "new"
    other.close()


def test_an_update_waits_for_another_thread_within_its_limit() -> None:
    record = AcceptorRecord.make(limit=0.1)

    def change(text: str) -> tuple[str, None]:
        with pytest.raises(CommTimeout, match="Another thread of this machine"):
            record.update(lambda text: ("inner", None))
        return "outer", None

    record.update(change)
    assert record.read() == "outer"
    record.close()


def test_the_record_outlives_the_process_that_made_it(record: AcceptorRecord) -> None:
    record.update(lambda text: ("text", None))
    other, path = follow(record.path), record.path
    record.close()
    record.close()
    assert other.update(lambda text: ("more", text)) == "text"
    with pytest.raises(CommError, match="can't be opened"):
        follow(path)
    other.close()


def test_another_file_is_no_record() -> None:
    reader, writer = os.pipe()
    memory = os.memfd_create("something else")
    for descriptor in (writer, memory):
        with pytest.raises(CommError, match="is no acceptor record"):
            follow(f"/proc/{os.getpid()}/fd/{descriptor}")
    for descriptor in (reader, writer, memory):
        os.close(descriptor)


def test_no_process_can_cut_the_memory_off(record: AcceptorRecord) -> None:
    with open(record.path, "r+b") as file, pytest.raises(PermissionError):
        file.truncate(4096)
    assert record.read() == ""


def test_a_forked_child_holds_nothing_of_it(record: AcceptorRecord) -> None:
    path, (reader, writer) = record.path, os.pipe()

    def look() -> None:
        with open("/proc/self/maps") as maps:
            mapped = "paceline acceptor" in maps.read()
        links = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.exists()]
        opened = any("paceline acceptor" in link for link in links)
        os.write(writer, f"{mapped} {opened}".encode())

    with forked(look):
        assert os.read(reader, 100) == b"False False"
    os.close(reader)
    os.close(writer)
    other = follow(path)
    record.update(lambda text: ("of the parent", None))
    assert other.read() == "of the parent"
    other.close()


def die_at_line(path: str, last: int) -> None:
    """Update the record, and be killed at the `last`-th line of its module."""
    record, lines = AcceptorRecord.open(path), 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal lines
        if frame.f_code.co_filename != acceptor_record.__file__:
            return None
        lines += event == "line"
        if lines == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    count_up(record)
    sys.settrace(None)


def test_a_kill_at_each_line_of_an_update_leaves_the_old_text_or_the_new(
    record: AcceptorRecord,
) -> None:
    path, outcomes = record.path, []
    count_up(record)
    while True:
        before = number_of(record)
        child = os.fork()
        if child == 0:
            die_at_line(path, len(outcomes) + 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        outcomes.append(number_of(record) - before)
        count_up(record)
        assert number_of(record) == before + outcomes[-1] + 1
    assert len(outcomes) > 20
    assert outcomes == sorted(outcomes)  # old texts, then new ones
    assert set(outcomes) == {0, 1}


def test_a_kill_at_any_moment_leaves_the_old_text_or_the_new(record: AcceptorRecord) -> None:
    path, chance = record.path, random.Random(15)
    reader, writer = os.pipe()

    def count() -> None:
        own = AcceptorRecord.open(path)
        while True:
            count_up(own)
            os.write(writer, b".")

    last = 0
    for _ in range(_KILLS):
        with forked(count):
            os.read(reader, chance.randrange(1, 20))
        assert last < number_of(record)
        last = number_of(record) + 1
        count_up(record)
        os.set_blocking(reader, False)
        with suppress(BlockingIOError):
            os.read(reader, 65536)
        os.set_blocking(reader, True)
    os.close(reader)
    os.close(writer)


def test_the_lock_of_a_killed_process_is_released_and_that_of_a_slow_one_isnt(
    record: AcceptorRecord,
) -> None:
    path, (reader, writer) = record.path, os.pipe()

    def change(text: str) -> tuple[str, None]:
        os.write(writer, b".")
        signal.pause()
        return "never", None

    other = follow(path)
    with forked(lambda: AcceptorRecord.open(path).update(change)):
        os.read(reader, 1)
        with pytest.raises(CommTimeout, match="continue or end the processes"):
            other.update(lambda text: ("new", None))
    other.update(lambda text: (text + "new", None))
    assert record.read() == "new"
    other.close()
    os.close(reader)
    os.close(writer)


def test_a_process_that_is_stopped_in_the_middle_of_an_update_is_killed(
    record: AcceptorRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record.path
    other = follow(path)

    def change(text: str) -> tuple[str, None]:
        os.kill(os.getpid(), signal.SIGSTOP)
        return "never", None

    with forked(lambda: AcceptorRecord.open(path).update(change)) as child:
        _, status = os.waitpid(child, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        other.update(lambda text: (text + "new", None))
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert record.read() == "new"
    assert f"Process {child} was stopped while" in capsys.readouterr().err
    other.close()


def test_no_update_of_three_processes_is_lost(record: AcceptorRecord) -> None:
    path, (reader, writer) = record.path, os.pipe()

    def add_often() -> None:
        own = AcceptorRecord.open(path)
        for _ in range(200):
            own.update(lambda text: (str(int(text or 0) + 1), None))
        os.write(writer, b".")

    with forked(add_often), forked(add_often), forked(add_often):
        done = b""
        while len(done) < 3:
            done += os.read(reader, 3)
    assert record.read() == "600"
    os.close(reader)
    os.close(writer)
