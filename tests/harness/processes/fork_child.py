"""Turns a fork into a new process: resets what its parent left in it, and runs a Python program."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import itertools
import json
import multiprocessing.util
import os
import random
import signal
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tests.harness.processes.python_program import ROOT, Program

ENVIRONMENT = "environment"  # the memory file of a fork that holds it
STREAMS = ("p2cread", "c2pwrite", "errwrite")  # the child's, as `subprocess.Popen` calls them

_modules: set[str] = set()
_parent_streams: list[Any] = []  # streams that a fork doesn't use and mustn't close
_parent_finalizers: list[Any] = []  # freeing thousands would copy the pages that they are on
_last_module = ""
_torch_state: Any = None


def record_state() -> None:
    """Record this process's imports and random state, to which its forks reset theirs."""
    global _last_module, _torch_state
    _torch_state = sys.modules["torch"].get_rng_state()
    _modules.update(sys.modules)
    _last_module = next(reversed(sys.modules))


def run_as_new_process(
    program: Program,
    arguments: Mapping[str, Any],
    *,
    namespaces: Sequence[int] = (),
    files: Mapping[int, int] | None = None,
    ignored: Sequence[int] = (),
) -> NoReturn:
    """Make this fork equal to a new process at its first line, and run the program to its end.

    Args:
        program: what to run.
        arguments: those of `subprocess.Popen._execute_child`.
        namespaces: descriptors of the kernel's namespaces to enter.
        files: descriptors to inherit besides the streams, by the number that each gets.
        ignored: signals that the program ignores from its start.
    """
    status = 1
    try:
        for descriptor in namespaces:
            _enter(descriptor)
        if arguments["start_new_session"]:
            os.setsid()
        if arguments["process_group"] != -1:
            os.setpgid(0, arguments["process_group"])
        _reset_signals()
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        _set_streams([arguments[name] for name in STREAMS], files or {})
        _reset_state()
        os.environ.clear()
        os.environ.update(arguments["env"])
        _show_environment(arguments["env"])
        if arguments["cwd"] is not None:
            os.chdir(arguments["cwd"])
        sys.orig_argv[:] = list(map(os.fspath, arguments["args"]))
        status = _status_of(program.run)
        _at_exit()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _enter(namespace: int) -> None:
    """Enter a namespace of the kernel (os.setns is new in Python 3.12)."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _set_streams(streams: Sequence[int], files: Mapping[int, int]) -> None:
    """Set the three streams, to the parent's where a number is -1, and the inherited files."""
    wanted = {number: fd for number, fd in enumerate(streams) if fd != -1} | dict(files)
    first = max([99, *files]) + 1
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, first) for number, fd in wanted.items()}
    os.closerange(3, first)
    for number, fd in high.items():
        os.dup2(fd, number)
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        _parent_streams.append(old)
        how = {"mode": "w" if number else "r", "encoding": old.encoding, "errors": old.errors}
        new = os.fdopen(number, closefd=False, buffering=1 if number == 2 else -1, **how)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _reset_state() -> None:
    """Undo what the parent did since `record_state`."""
    gc.freeze()  # what the parent holds isn't this process's to close
    _parent_finalizers.append(weakref.finalize._registry)  # type: ignore[attr-defined]
    weakref.finalize._registry = {}  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    for name in _new_modules():
        file = getattr(sys.modules[name], "__file__", None) or ""
        if not file.startswith((sys.prefix, sys.base_prefix, str(ROOT / "paceline"))):
            del sys.modules[name]
    random.seed()
    sys.modules["torch"].set_rng_state(_torch_state)
    sys.modules["numpy"].random.seed()


def _new_modules() -> list[str]:
    """List what was imported since `record_state`, touching none of the thousands before that."""
    last = [*itertools.takewhile(lambda name: name != _last_module, reversed(sys.modules))]
    return [name for name in last if name not in _modules]


def _show_environment(variables: Mapping[str, str]) -> None:
    """Hold the environment where `environment_of` finds it: /proc shows the server's."""
    with os.fdopen(os.memfd_create(ENVIRONMENT, os.MFD_CLOEXEC), "w", closefd=False) as file:
        json.dump(dict(variables), file)


def _status_of(run: Callable[[], None]) -> int:
    """Run a program to its end, as the interpreter does; return its exit status."""
    try:
        run()
    except SystemExit as end:
        return _exit_status(end)
    except BaseException as error:
        try:
            sys.excepthook(type(error), error, _own_frames(error.__traceback__))
        except SystemExit as end:
            return _exit_status(end)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _exit_status(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _own_frames(found: types.TracebackType | None) -> types.TracebackType | None:
    """Leave out the frames of this file, in which a program of its own doesn't run."""
    while found is not None and found.tb_frame.f_code.co_filename == __file__:
        found = found.tb_next
    return found


def _at_exit() -> None:
    """Do what the interpreter does at its end."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
