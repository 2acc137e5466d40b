"""A program of its own: run a command, and end it with the supervisor that wants it.

    python -I -S parent_death_watchdog.py COMMAND …

The command knows nothing of its supervisor. This process is between them: its standard input is a
pipe that only the supervisor holds open, and at its end it kills its process group, the command and
whatever that started among it. Signals reach the command directly, as one of the group, and are
ignored here. The end is the command's: its status, or the signal that killed it.

What the supervisor writes into the pipe:

    PATH    at the start: the worker's survival mark
    end     before an end that it wants: after a signal, a failure, or a good end

The end of the pipe without the word `end` means that the supervisor was killed. A worker with a
mark continues then: its world survives the loss of a process. One without reports that, and ends.

A supervisor that is killed while Ctrl-Z has stopped it and its workers would leave them stopped for
ever. So each asks the kernel to be continued at the end of its parent.

It imports nothing of the package, so that it is up at once and takes little memory.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

END = b"end\n"
"""What the supervisor writes before an end that it wants."""

_REPORT_S = 2.0
_PR_SET_PDEATHSIG = 1  # of prctl(2)


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    # The command gets another standard input, and must not hold this pipe open.
    supervisor = os.dup(0)
    continue_at_end_of_parent()
    ended = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for number in ended:
        signal.signal(number, lambda *_: None)  # the command doesn't inherit a handler
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"paceline: {argv[0]} can't be started: {error.strerror}.", file=sys.stderr)
        return 2
    threading.Thread(target=watch_parent, args=(supervisor,), daemon=True).start()
    status = process.wait()
    # A shell that reads this process's status sees what the command's would have said.
    if status < 0:  # end by the signal that ended the command, without a second core dump
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def continue_at_end_of_parent() -> None:
    """Let this process be continued, if it is stopped, when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))


def watch_parent(
    pipe: int,
    lost: Callable[[], None] = lambda: None,
    ends: Callable[[], None] = lambda: None,
) -> None:
    """Wait for the supervisor's end; then kill this process's group, unless it survives.

    Args:
        pipe: ends with the supervisor.
        lost: called where the supervisor was killed and this worker continues.
        ends: called where the supervisor was killed and this worker ends with it, which it does
            some seconds later at the latest.
    """
    with open(pipe, "rb") as lines:
        mark = _opened(lines.readline().rstrip(b"\n"))
        wanted = lines.readline() == END
        # Until the end of the pipe: only then is the supervisor gone.
        lines.read()
    if mark is not None and not wanted and os.pread(mark, 1, 0):
        os.killpg(0, signal.SIGCONT)  # the command, of which this may be the wrapper
        lost()
    else:
        if not wanted:
            report = threading.Thread(target=ends, daemon=True)
            report.start()
            report.join(_REPORT_S)  # no reader may empty the pipe that it writes to
        os.killpg(0, signal.SIGKILL)


def _opened(path: bytes) -> int | None:
    """Open the mark, which then outlives the supervisor."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the supervisor is gone already
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
