"""Bad inputs, and what must be true of the answer to each.

- The status: 2 for a user's mistake, 1 for any other failure, 130 or 143 for a signal.
- The message: one or two sentences, printed once and last, with value, rule and remedy.
- Nothing else: no traceback, no process left, no file removed, and no file written but a run's.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - now: a test may run as a user who can't read its file
import hashlib
import re
import shlex
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import paceline.cli.train  # noqa: F401 - likewise
from paceline.cli.main import main
from tests.harness.processes.command import Command, Result, all_end, kill
from tests.harness.processes.fork_server import environment_of

LIMIT = 110.0  # generous: the machine may be busy
MARK = "PACELINE_TEST_MARK"
RANK_PREFIX = r"rank \d on machine \d \(\S+\): "
TRAIN = (
    "train --image_size 32 --augment none --num_labels 3 --batch_size 4 --num_epochs 1 --use_cpu "
)
NULL = TRAIN + "--train_data null --epoch_size 8 "
NET = '''
from torch import nn


def net(num_labels):
    """A net that needs no time."""
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, num_labels))
'''

_BOX = re.compile(r"[╭╮╰│]")
_RULER = re.compile(r" ?─{4,} ?")


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A command that fails, and its answer.

    Attributes:
        command: the command's arguments, as in a shell.
        message: the whole message, as a regular expression, without "paceline: ".
        status: the exit status.
        writes: the command may leave a run's folder, because only a worker detects the failure.
    """

    command: str
    message: str
    status: int = 2
    writes: bool = False


def write_model(folder: Path, monkeypatch: pytest.MonkeyPatch, own: str = NET) -> Path:
    """Write a user's model into a folder, `own:net` or what `own` has, and change into it."""
    (folder / "own.py").write_text(own)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "own", raising=False)  # another test's
    return folder


def require_answer(bad: Bad, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Run a command in this process, and check its answer and what it leaves.

    A command that may start workers runs as a process of its own.
    """
    if bad.writes or bad.status == 1:
        require_run_answer(bad, folder)
        return
    before, family = contents(folder), set(psutil.Process().children(recursive=True))
    require_message(answer(bad.command, capfd), bad.status, bad.message)
    assert all_end([p for p in psutil.Process().children(recursive=True) if p not in family])
    assert contents(folder) == before


def answer(words: str | list[str], capfd: pytest.CaptureFixture[str]) -> Result:
    """Run a command in this process."""
    capfd.readouterr()
    try:
        status = main(shlex.split(words) if isinstance(words, str) else words)
    except SystemExit as end:
        status = int(end.code or 0)
    printed = capfd.readouterr()
    return Result(status, printed.out + printed.err)


def require_run_answer(bad: Bad, folder: Path) -> Result:
    """Run the command as a process, and check its answer and what it leaves."""
    before = contents(folder)
    with no_process_left() as environment:
        variables = {**environment, "PYTHONPATH": str(folder)}
        command = Command(*shlex.split(bad.command), folder=folder, environment=variables)
        ended = command.wait(LIMIT)
    require_message(ended, bad.status, bad.message)
    if not bad.writes:
        left = contents(folder)
        assert left == before, {*left} ^ {*before}
    return ended


def require_message(ended: Result, status: int, expected: str) -> str:
    """Require an end with this status that printed this message once and last; return it."""
    assert ended.status == status, ended.text
    assert not re.search(r"Traceback|frame #\d", ended.text), ended.text  # Python's, C++'s
    if "╭" in ended.text:
        message, *more = sections(ended.text)
        assert re.fullmatch(r"For full helptext, (run|see) paceline.* --help", more[-1])
    else:
        message = [line for line in ended.text.splitlines() if line.strip()][-1]
        assert message.startswith("paceline: ")
        assert ended.text.count(message) == 1
        assert 1 <= len(re.findall(r"[.?](?= |$)", message)) <= 2, message
    message = message.removeprefix("paceline: ")
    assert re.fullmatch(expected, message), (
        f"{message!r} isn't {expected!r}; the whole output:\n{ended.text}"
    )
    return message


def sections(text: str) -> list[str]:
    """Return the text of each section of the box that reports a mistake in the flags."""
    box = _BOX.sub(" ", text[text.index("╭") : text.rindex("╯")]).partition("\n")[2]
    return [part for part in (" ".join(part.split()) for part in _RULER.split(box)) if part]


def contents(folder: Path) -> dict[str, str]:
    """Return what is in a folder: each path, and a digest of each file."""
    return {
        str(path.relative_to(folder)): _digest(path)
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


@contextmanager
def no_process_left() -> Iterator[Mapping[str, str]]:
    """Yield an environment for commands; require that no process has it after the block."""
    mark = uuid.uuid4().hex
    try:
        yield {MARK: mark}
        assert all_end(_marked(mark)), [process.cmdline() for process in _marked(mark)]
    finally:
        kill(*_marked(mark))


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if environment_of(process).get(MARK) == mark:
                found.append(process)
        except psutil.Error:  # it has ended, or is the kernel's
            continue
    return found
