"""Whoever reads a command's output may stop reading."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("words", ["--help", "--version", "db --help"])
def test_a_reader_who_has_seen_enough_ends_the_command_without_a_word(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "paceline.cli.main", *words.split()]
        ended = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")
