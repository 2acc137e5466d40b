"""A command's imports are excluded from garbage collection."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc, weakref
from paceline.cli.garbage_collection import uncollected

class Cycle:
    def __init__(self):
        self.itself = self

collections = sum(of["collections"] for of in gc.get_stats())
with uncollected():
    inside = weakref.ref(Cycle())
    [Cycle() for _ in range(100_000)]
assert sum(of["collections"] for of in gc.get_stats()) == collections
assert gc.isenabled() and gc.get_freeze_count() > 100_000
outside = weakref.ref(Cycle())
gc.collect()
assert inside() is not None and outside() is None

gc.disable()
with uncollected():
    outside = weakref.ref(Cycle())
assert not gc.isenabled()
gc.collect()
assert outside() is None
"""
COMMAND = """
import gc
from paceline.cli.main import main

def run(*words):
    try:
        main(words)
    except SystemExit:
        pass
    assert gc.isenabled()
    return gc.get_freeze_count()

first = run("db", "--help")
again = run("db", "nothing")
assert first > 30_000 and again <= first, (first, again)
"""


def test_nothing_is_collected_in_the_block_and_nothing_of_it_afterwards() -> None:
    assert subprocess.run([sys.executable, "-c", CODE], timeout=60).returncode == 0


def test_a_commands_imports_are_kept_once() -> None:
    command = [sys.executable, "-c", COMMAND]
    ended = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
