"""`launch`: runs a function in local workers, from a notebook or a script.

    notebook ── launch(train, workers=2) ── worker 0: train() ── paceline.join(), …
         ▲                               └─ worker 1: train() ── paceline.join(), …
         └── [result 0, result 1], or the first error

A worker is a new interpreter, not a fork: after the notebook has computed anything, a fork of it
hangs in OpenMP, and its autograd and CUDA refuse to work. The workers are supervised as those of
`paceline launch` are.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from paceline.api.functions.function_call import FunctionCall
from paceline.api.open_world import end_earlier_world
from paceline.cluster.environment import Environment, read_environment
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.supervision.event_queue import EventQueue
from paceline.cluster.supervision.machine_endpoint import MachineEndpoint
from paceline.cluster.supervision.supervisor import run_workers
from paceline.errors import ConfigError, PacelineError


def launch(function: Callable[..., Any], *arguments: Any, workers: int | None = None) -> list[Any]:
    """Run a function in several local workers, whose ranks `paceline.join()` returns.

    The function may be a notebook's. It is sent to the workers by value, together with the
    variables of the notebook that it uses. Each worker is a new process.

    Args:
        function: calls `paceline.join()`, and trains; a world that it leaves open is closed.
        arguments: of the function, the same in each worker.
        workers: the number of workers; by default one per GPU, or one worker without GPUs.

    Returns:
        what the function returned in each worker, in rank order; None where that can't be pickled.

    Raises:
        ConfigError: an argument breaks a rule, the function can't be sent, or a worker has raised a
            `ConfigError`.
        PacelineError: a worker has failed; the sentence names its rank and has its traceback.
        KeyboardInterrupt: the cell was interrupted; all workers have ended.
    """
    environment = read_environment()
    _require_launchable(environment)
    end_earlier_world("paceline.launch()", interactive=environment.interactive)
    count = max(1, torch.cuda.device_count()) if workers is None else workers
    if count < 1:
        raise ConfigError(f"workers is {workers}; it must be at least 1.")
    plan = RunPlan(workers=count, runs_command=True)
    with FunctionCall(function, arguments, count) as call:
        # Unbuffered: a cell shows the workers' lines at once.
        argv = [
            sys.executable,
            "-u",
            "-m",
            "paceline.api.functions.function_worker",
            str(call.path),
        ]
        with closing(EventQueue()) as events:
            with events.signals():
                failure = run_workers(
                    plan, argv, events, prints_failure=False, open_endpoint=MachineEndpoint
                )
            if events.signal is not None:
                signal.raise_signal(events.signal)  # whose handler is the caller's again
        if failure is not None:
            raise _error(failure)
        return call.results()


def _require_launchable(environment: Environment) -> None:
    launched = environment.launched
    if environment.worker is not None or (launched is not None and launched.world_size > 1):
        raise ConfigError(
            "paceline.launch() was called in a process that a launcher started as one of several: "
            "call paceline.join() there."
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "paceline.launch() was called in another thread than the main thread, which alone "
            "receives signals: call it in the main thread."
        )


def _error(failure: FailureReport) -> PacelineError:
    kind = ConfigError if failure.status == ConfigError.status else PacelineError
    return kind(failure.text)
