"""A program of its own: a worker of `paceline.launch`, which calls one function.

    python -m paceline.api.functions.function_worker CALL

An error of the function is reported as that of a script under `paceline launch` is. A world that
the function has left open is closed after it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from paceline.api.exit_handler import ExitHandler
from paceline.api.functions import function_call
from paceline.api.open_world import open_world
from paceline.cluster.environment import read_environment
from paceline.cluster.print_message import print_message
from paceline.cluster.supervision.worker import end_with_supervisor, report_lost_supervisor


def main(path: Path) -> None:
    """Make the call."""
    environment = read_environment()
    worker = environment.worker
    assert worker is not None

    def report_lost() -> None:
        world = open_world()
        report_lost_supervisor(worker, None if world is None else world.folder)

    end_with_supervisor(report_lost)
    exit_handler = ExitHandler(environment)
    rank = worker.local_rank
    try:
        call = function_call.ReceivedCall(path, rank)
        result = call.make()
        if (world := open_world()) is not None:
            world.close()
        if reason := call.give(result):
            print_message(
                f"rank {rank}'s result can't be sent to the caller ({reason}): launch() returns "
                "None in its place."
            )
    except Exception as error:
        hook = sys.excepthook if isinstance(sys.excepthook, ExitHandler) else exit_handler
        hook(type(error), error.with_traceback(_of_function(error)), None)


def _of_function(error: Exception) -> TracebackType | None:
    """Leave out the frames of this file and of the call."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename in (
        __file__,
        function_call.__file__,
    ):
        found = found.tb_next
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
