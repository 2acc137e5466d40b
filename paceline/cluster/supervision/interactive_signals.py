"""Signals in an interactive interpreter, a notebook's kernel say, which must outlive its cells.

    SIGINT in a step   KeyboardInterrupt at the end of the step; inside the step after 1.5 s, or at
                       the second SIGINT
    SIGINT elsewhere   as without Paceline
    SIGTERM            the newest state in memory is saved; then as without Paceline

A kernel sets a handler of SIGINT for each cell, so each step sets its own and restores the last.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_STEP_S = 1.5  # a step that is interrupted may take that long to its end
_SAVE_S = 3.0


class InteractiveSignals:
    """Receiver of SIGINT and SIGTERM in an interactive interpreter.

    Args:
        enabled: whether the interpreter is interactive; otherwise `postponed` has no effect.

    Attributes:
        enabled: likewise.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Postpone an interrupt to the end of the block, which makes a step."""
        main = threading.main_thread()
        before = signal.getsignal(signal.SIGINT) if self.enabled else None
        # Python sets handlers in the main thread alone;
        # SIG_IGN and SIG_DFL can't be called at the end.
        if not callable(before) or threading.current_thread() is not main:
            yield
            return
        again: list[threading.Timer] = []  # that interrupts a long step; none: no interrupt came

        def receive(number: int, frame: FrameType | None) -> None:
            if again:
                before(number, frame)
                return
            assert main.ident is not None
            # A step may hang in a wait: the interrupt takes effect inside it then.
            timer = threading.Timer(_STEP_S, signal.pthread_kill, (main.ident, signal.SIGINT))
            timer.daemon = True
            again.append(timer)
            timer.start()

        signal.signal(signal.SIGINT, receive)
        try:
            yield
        finally:
            for timer in again:
                timer.cancel()
            signal.signal(signal.SIGINT, before)
        if again:
            before(signal.SIGINT, None)

    @contextmanager
    def received(self, rescue: Callable[[], object]) -> Iterator[None]:
        """Save before SIGTERM takes its effect; main thread only.

        Args:
            rescue: saves what can be saved, from another thread.
        """
        before = signal.getsignal(signal.SIGTERM)
        process = os.getpid()
        if before is None or before == signal.SIG_IGN:
            yield
            return

        def receive(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGTERM, before)
            if os.getpid() == process:  # not in a fork of it
                saving = threading.Thread(target=rescue, name="rescue", daemon=True)
                saving.start()
                saving.join(_SAVE_S)  # the main thread may hold a lock here that `rescue` needs
            os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, receive)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) is receive:
                signal.signal(signal.SIGTERM, before)
