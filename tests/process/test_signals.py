"""Signals are noticed at once, whatever the main thread does, and end the process in time."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.harness.processes.fork_server import ServedPopen

PROGRAM = """
import os, signal, sys, threading
from paceline.cluster.supervision.stop_signals import StopSignals

signals = StopSignals()
with signals.received(lambda: print("rescued", flush=True)):
    print("ready", flush=True)
    if sys.argv[1] == "parent":
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(10)
        _, status = os.waitpid(child, 0)
        threading.Event().wait(0.2)  # in which the listener would have heard it
        print("child ended by", os.WTERMSIG(status), flush=True)
        print("parent has", signals.status, flush=True)
    elif sys.argv[1] == "polite":
        while not signals.status:
            threading.Event().wait(0.01)
    else:
        import torch
        values = torch.randn(10_000_000)
        while True:
            torch.cumsum(values.expand(200, -1), 0)  # long, in C++
print("left with", signals.status, flush=True)
sys.exit(signals.status)
"""


@contextmanager
def program(manner: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, manner]
    with ServedPopen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_loop_that_looks_ends_itself_and_nothing_is_rescued(number: signal.Signals) -> None:
    with program("polite") as process:
        process.send_signal(number)
        text, _ = process.communicate(timeout=10)
    assert text == f"left with {128 + number}\n"
    assert process.returncode == 128 + number


def test_a_forked_childs_signals_are_its_own() -> None:
    with program("parent") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"child ended by {signal.SIGTERM.value}\n"
        assert process.stdout.readline() == "parent has 0\n"


def test_a_process_that_is_lost_in_a_long_operation_saves_and_ends() -> None:
    with program("stubborn") as process:
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=20)
    assert text == "rescued\n"
    assert process.returncode == 143
