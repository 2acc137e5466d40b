"""Reader of a document: runs its blocks in a folder.

Hosts and ports of the examples become those of servers on this machine.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from tests.harness.documents.documents import TRAIN, Block
from tests.harness.network.ports import free_port
from tests.harness.processes.fork_server import ServedPopen

LIMIT = 100
PROGRAMS = ("paceline ", "resnet50_trainer ", "python ", "torchrun ")
_VARIABLES = re.compile(r"(?:[A-Z_]+=\S+ )*")  # before a program
_SHELL_STATE = re.compile(r"(cd|export|source|for|while|if|\w+=\S*$|.*&$)")  # of later commands
_BOX = re.compile(r"[╭╮╰╯│─]")


class Reader:
    """Follows blocks in `folder`.

    Args:
        folder: the current folder of all commands.
        redis: URLs of a Redis server without a password and of one with it.
    """

    def __init__(self, folder: Path, redis: Sequence[str]) -> None:
        self._folder = folder
        free, guarded = (urlsplit(url) for url in redis)
        self._places = {
            "--redis_host redis.lab --redis_port 6379": "--redis_host 127.0.0.1 "
            f"--redis_port {free.port}",
            "redis.lab:6379": f"127.0.0.1:{guarded.port}",
            ":PASSWORD@": f":{guarded.password}@",
            "node0:29500": f"127.0.0.1:{free_port()}",
            "/shared/": f"{folder}/shared/",
        }

    def follow(self, block: Block) -> None:
        """Do what a block of any language but console says; its end must have its status."""
        if "file" in block.marks:
            (self._folder / block.marks["file"]).write_text(block.text)
        elif block.language == "python":
            self._ends([self._start([sys.executable, "-W", "error", "-c", block.text])], block)
        elif "two machines" in block.marks:
            self._ends([self._command(self._short(c, block)) for c in block.commands], block)
        elif not any(map(_SHELL_STATE.match, block.commands)) and "tried twice" not in block.marks:
            *first, last = [self._short(command, block) for command in block.commands]
            for command in first:
                said, status = self._said(self._command(command))
                assert status == 0, f"line {block.line}:\n{said}"
            self._ends([self._command(last)], block)
        else:
            text = "\n".join(self._short(command, block) for command in block.commands)
            script = self._script(text)
            if "tried twice" in block.marks and script.wait(LIMIT):
                script.communicate()
                script = self._script(text)
            self._ends([script], block)

    def here(self, command: str) -> str:
        """Put this machine's places into a command."""
        for example, here in self._places.items():
            command = command.replace(example, here)
        return command

    def _short(self, command: str, block: Block) -> str:
        """Add what makes a training short."""
        command = self.here(command)
        if "test adds" in block.marks and command.startswith(TRAIN):
            return f"{command} {block.marks['test adds']}"
        return command

    def _command(self, command: str) -> subprocess.Popen[str]:
        """Start a command, without a shell where it needs none."""
        given = _VARIABLES.match(command)
        before = given[0] if given else ""
        program = command.removeprefix(before)
        if not _is_plain(program):
            return self._script(command)
        variables = dict(word.split("=", 1) for word in before.split())
        return self._start(shlex.split(program), variables)

    def _script(self, text: str) -> subprocess.Popen[str]:
        return self._start(["bash", "-euo", "pipefail", "-c", text])

    def _start(
        self, command: list[str], variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return ServedPopen(
            command,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PATH": path, **(variables or {})},
            start_new_session=True,
        )

    def _ends(self, processes: list[subprocess.Popen[str]], block: Block) -> None:
        try:
            for process in processes:
                if "interrupted after" in block.marks:
                    _interrupt(process, block.marks["interrupted after"])
                said, status = self._said(process)
                assert status == block.status, f"line {block.line}:\n{said}"
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    process.communicate(timeout=10)

    @staticmethod
    def _said(process: subprocess.Popen[str]) -> tuple[str, int]:
        """Wait for a process; return what it said, and its status."""
        said, _ = process.communicate(timeout=LIMIT)
        return said, process.returncode


def _is_plain(command: str) -> bool:
    """Return whether a command is a program and its arguments, with nothing for a shell to do."""
    return command.startswith(PROGRAMS) and not re.search(r"[$`*?&|;<>(){}\[\]~]", command)


def _interrupt(process: subprocess.Popen[str], after: str) -> None:
    """Do what a terminal does at Ctrl-C, once the process has said some words."""
    assert process.stdout is not None
    for line in process.stdout:
        if after in line:
            os.killpg(process.pid, signal.SIGINT)
            return


def says(said: str, expected: str) -> bool:
    """Return whether a text occurs in what was said; "…" stands for anything."""
    parts = _plain(expected).split("…")
    return re.search(".*?".join(map(re.escape, parts)), _plain(said)) is not None


def _plain(text: str) -> str:
    """Leave out boxes and line ends."""
    return " ".join(_BOX.sub(" ", text).split())
