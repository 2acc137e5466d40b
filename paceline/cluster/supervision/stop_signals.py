"""SIGTERM and SIGINT in a process that trains: noticed at once, effective at the next step's end.

A handler of Python's runs only when the main thread is back from C++, which a long convolution or
a wait for a peer may keep for a while. The system writes the signal's number into a pipe instead,
and a thread that reads it does at once what can't wait:

    signal ─▶ number ── 1.5 s ──▶ rescue() ── until 3.5 s ──▶ the process ends, with 128 + number
                    └─ the loop ends itself at a step boundary, as a rule before that
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from paceline.cluster.print_message import print_message
from paceline.cluster.supervision.worker import report_stop

# A step at a boundary of its own ends better, and most steps are shorter. The rest, up to five
# seconds with the supervisor's part, is for writing a checkpoint.
_RESCUE_S = 1.5
_END_S = 3.5


class StopSignals:
    """Receiver of SIGTERM and SIGINT; use `with signals.received(rescue):` in the main thread."""

    def __init__(self) -> None:
        self._reports: list[Callable[[signal.Signals], None]] = []
        self._asked = False  # by another process of the run
        self._receiving = False
        self._number = 0
        self._ended = threading.Event()

    @property
    def status(self) -> int:
        """The exit status that a signal asks for: 128 + its number; 0 as long as there is none."""
        return 128 + self._number if self._number else 0

    def when_received(self, report: Callable[[signal.Signals], None]) -> None:
        """Call a function with the signal that is received, in another thread."""
        self._reports.append(report)

    def stop(self, supervised: bool) -> None:
        """End this process as SIGTERM does, because another one ends the run; from any thread.

        The signal isn't reported: the other process reports why the run ends.

        Args:
            supervised: whether a supervisor ends it, too. Then a process that doesn't receive the
                signal, and would end at once, waits for that: its supervisor has the reason.
        """
        self._asked = True
        if self._receiving or not supervised:
            os.kill(os.getpid(), signal.SIGTERM)

    @contextmanager
    def received(self, rescue: Callable[[], str]) -> Iterator[None]:
        """Listen inside the block.

        Args:
            rescue: saves what can be saved, from another thread, where the block doesn't end soon
                after a signal; returns a sentence that is printed if the process ends then, or "".
        """
        reader, writer = os.pipe()
        # The system writes into the pipe in a signal's handler, which must not wait.
        os.set_blocking(writer, False)
        before = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            # Schedulers announce an end by them, to all processes; a script's own handler stays.
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, lambda *_: None)
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

        def forget() -> None:
            """Let a forked child (of a DataLoader) have its own signals, and end by them."""
            if not self._ended.is_set():
                signal.set_wakeup_fd(wakeup)
                for number, handler in before.items():
                    signal.signal(number, handler)

        os.register_at_fork(after_in_child=forget)
        thread = threading.Thread(
            target=self._listen, args=(reader, rescue), name="signals", daemon=True
        )
        thread.start()
        self._receiving = True
        try:
            yield
        finally:
            self._receiving = False
            self._ended.set()
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(writer)
            thread.join()
            os.close(reader)

    def _listen(self, reader: int, rescue: Callable[[], str]) -> None:
        while received := os.read(reader, 1):
            if received[0] in (signal.SIGTERM, signal.SIGINT):
                self._number = received[0]
                deadline = monotonic() + _END_S
                report_stop(signal.Signals(received[0]), consequence=self._asked)
                for report in () if self._asked else self._reports:
                    report(signal.Signals(received[0]))
                if not self._ended.wait(_RESCUE_S):
                    saved = rescue()
                    if not self._ended.wait(max(0.0, deadline - monotonic())):
                        if saved:
                            print_message(saved)
                        # Not sys.exit: the main thread is somewhere in C++, and would not see it.
                        os._exit(self.status)
                return
