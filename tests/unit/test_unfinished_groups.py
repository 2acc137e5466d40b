"""Aborted process groups are dropped once their collectives have ended, and never by an exit."""

from __future__ import annotations

import subprocess
import sys
import weakref
from typing import Any

from paceline.comm.process_group import UnfinishedGroups
from tests.harness.processes.python_program import ROOT


class Collective:
    """Collective that ends when a test sets `ended`."""

    ended = False

    def is_completed(self) -> bool:
        return self.ended


class Group:
    """Process group."""


def test_a_group_is_kept_until_its_collectives_have_ended() -> None:
    groups, collective, group = UnfinishedGroups(), Collective(), Group()
    works: list[Any] = [collective]
    kept = weakref.ref(group)
    groups.add(group, works)
    del group
    assert len(groups) == 1
    assert kept() is not None
    collective.ended = True
    assert len(groups) == 0
    assert kept() is None


def test_a_group_whose_collectives_have_ended_is_not_kept() -> None:
    groups, group = UnfinishedGroups(), Group()
    kept = weakref.ref(group)
    groups.add(group, [])
    assert len(groups) == 0
    del group
    assert kept() is None


_PROGRAM = """
from paceline.comm.process_group import UNFINISHED

class Group:
    def __del__(self):
        print("dropped")

class Collective:
    def __init__(self, ended):
        self.is_completed = lambda: ended

UNFINISHED.add(Group(), [Collective(True)])
UNFINISHED.add(Group(), [Collective(False)])
print("exit")
"""


def test_the_end_of_the_process_drops_no_group_that_a_thread_uses() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert (ended.stdout, ended.returncode) == ("dropped\nexit\n", 0), ended.stderr
