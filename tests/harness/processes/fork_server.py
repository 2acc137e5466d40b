"""Fork server: starts Python programs as forks of a process that has imported torch.

    test ── argv, folder, environment, streams ──▶ server ── fork ──▶ paceline train
         ◀────────── pid, exit status ───────────                        │ fork
                                                                  worker 0, worker 1

A program that imports torch and what torch imports with its first optimizer takes five processor
seconds before it does anything; a fork takes a tenth of one. What a fork starts by `subprocess` is
forked as well, where it is a Python program of the same environment. Everything else is real:
processes, parents, sessions, signals, streams, exit statuses, the environment, the current folder.

A fork differs from a program of its own in what happens before its first line: no import of the
package, no seed of string hashes, no interpreter flags. So each seam has one test with a real
process (`real=True`), and a program with flags or variables for its interpreter gets one always.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import gc
import inspect
import json
import multiprocessing.util
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import psutil

ROOT = Path(__file__).parents[3]
ENVIRONMENT = "environment"  # the memory file of a fork that holds it
PREPARED = (
    *("torch", "torch.distributed", "torch._dynamo", "torch.utils.data", "numpy", "numba"),
    *("sklearn.datasets", "PIL.Image", "safetensors.torch"),
    *("paceline", "paceline.cli.main", "paceline.cli.train", "paceline.cli.launch"),
    *("paceline.codecs.kernels.compiled", "paceline.cli.worker", "paceline.cli.train_launched"),
)
_HARMLESS = {"-I", "-S", "-P", "-u", "-B"}  # options that change nothing once torch is there
_STREAMS = ("p2cread", "c2pwrite", "errwrite")
_ARGUMENTS = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Program:
    """A Python program: a module, a file or code, and its arguments."""

    kind: str
    name: str
    arguments: Sequence[str]

    @classmethod
    def of(cls, argv: Sequence[str], environment: Mapping[str, str]) -> Program | None:
        """Read a command; None where it is no Python program of this environment."""
        first, *words = map(os.fspath, argv)
        found = shutil.which(first, path=environment.get("PATH"))
        if found is None or Path(found).absolute().parent != Path(sys.executable).parent:
            return None
        if not Path(found).name.startswith("python"):
            with Path(found).open("rb") as file:
                python = file.readline() == f"#!{sys.executable}\n".encode()
            return cls("file", found, words) if python else None
        while words and words[0] in _HARMLESS:
            words.pop(0)
        if len(words) >= 2 and words[0] in ("-m", "-c"):
            return cls({"-m": "module", "-c": "code"}[words[0]], words[1], words[2:])
        return cls("file", words[0], words[1:]) if words and words[0][:1] != "-" else None

    def has_other_paceline(self, folder: Path | str | None, environment: Mapping[str, str]) -> bool:
        """Return whether it imports Paceline from another checkout than this one."""
        here = Path(folder or ".").absolute()
        first = here / Path(self.name).parent if self.kind == "file" else here
        own = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
        path = [first, *(here / name for name in own)]
        found = [each for each in path if (each / "paceline/__init__.py").exists()]
        return bool(found) and found[0].resolve() != ROOT

    def run(self) -> None:
        """Run it as the interpreter would."""
        start = {"module": os.getcwd(), "code": "", "file": str(Path(self.name).absolute().parent)}
        own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [start[self.kind], *filter(None, own), *_server_path]
        sys.argv[:] = [{"module": self.name, "code": "-c", "file": self.name}[self.kind]]
        sys.argv += self.arguments
        if self.kind == "module":
            sys.modules.pop(self.name, None)
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        elif self.kind == "file":
            main = types.ModuleType("__main__")
            main.__file__ = self.name
            sys.modules["__main__"] = main
            exec(compile(Path(self.name).read_bytes(), self.name, "exec"), main.__dict__)
        else:
            main = types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(self.name, "<string>", "exec"), main.__dict__)


RealPopen = subprocess.Popen  # where a test replaces it


class _Popen(subprocess.Popen[Any]):
    """A `Popen` that starts Python programs of this environment in its own way."""

    def _execute_child(self, *given: Any) -> None:
        arguments = _ARGUMENTS.bind(self, *given).arguments
        environment = os.environ if arguments["env"] is None else arguments["env"]
        plain = not arguments["shell"] and not arguments["preexec_fn"] and not arguments["pass_fds"]
        argv = arguments["args"]
        program = None
        if plain and not isinstance(argv, str) and _same_interpreter(environment):
            program = Program.of(argv, environment)
        if program is None or program.has_other_paceline(arguments["cwd"], environment):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        self.pid = self._start(program, {**arguments, "env": dict(environment)})
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(arguments[n] for n in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
            *(arguments[n] for n in ("errread", "errwrite")),
        )

    def _start(self, program: Program, arguments: dict[str, Any]) -> int:
        raise NotImplementedError


class ForkingPopen(_Popen):
    """A `Popen` that forks this process."""

    def _start(self, program: Program, arguments: dict[str, Any]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            _become(program, arguments)
        return pid


class ServedPopen(_Popen):
    """A `Popen` that has the fork server fork: the process is the server's child."""

    def _start(self, program: Program, arguments: dict[str, Any]) -> int:
        self._status, told = os.pipe()
        folder = arguments["cwd"] or os.getcwd()
        request = {
            "argv": list(map(os.fspath, arguments["args"])),
            "cwd": os.fspath(folder),
            "env": arguments["env"],
            "start_new_session": arguments["start_new_session"],
        }
        streams = [
            number if arguments[name] == -1 else arguments[name]
            for number, name in enumerate(_STREAMS)
        ]
        socket.send_fds(server().control, [json.dumps(request).encode()], [*streams, told])
        os.close(told)
        pid = int.from_bytes(os.read(self._status, 8), "little")
        assert pid, "the fork server ended"
        return pid

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if not hasattr(self, "_status"):
            return super()._try_wait(flags)  # type: ignore[misc,no-any-return]
        if flags == os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        status = os.read(self._status, 8)
        os.close(self._status)
        assert status, "the fork server ended"
        return self.pid, int.from_bytes(status, "little")

    def _internal_poll(self, *given: Any, **also: Any) -> int | None:
        if not hasattr(self, "_status"):
            return super()._internal_poll(*given, **also)  # type: ignore[misc,no-any-return]
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode

    def __del__(self) -> None:
        """Say nothing of a process that still runs: the harness ends what it starts."""


class Server:
    """The fork server of this process, as a test holds it.

    Attributes:
        control: takes requests.
        pid: the server's process.
    """

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        quiet = {"OMP_WAIT_POLICY": "PASSIVE", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self._process = RealPopen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**environment, **threads, **quiet},
        )
        self.pid = self._process.pid
        theirs.close()
        atexit.register(self.close)

    def close(self) -> None:
        """Let the server end."""
        self.control.close()
        self._process.wait()


@functools.cache
def server() -> Server:
    """Return this process's server, started at the first call."""
    return Server()


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process, which may be a fork."""
    with suppress(OSError):  # it may end meanwhile
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            if os.readlink(link).startswith(f"/memfd:{ENVIRONMENT} "):
                return dict(json.loads(link.read_text()))
    return dict(process.environ())


def _same_interpreter(environment: Mapping[str, str]) -> bool:
    """Tell whether no variable is for the interpreter's start alone."""

    def own(variables: Mapping[str, str]) -> dict[str, str]:
        return {k: v for k, v in variables.items() if k[:6] == "PYTHON" and k != "PYTHONPATH"}

    return own(environment) == own(os.environ)


_server_path: list[str] = []
_server_modules: set[str] = set()
_parents: list[Any] = []  # streams that a fork doesn't use and mustn't close
_torch_state: Any = None


def _serve(number: int) -> None:
    """Fork programs on request, until the test's process has gone."""
    global _torch_state
    for name in PREPARED:
        try:
            import_module(name)
        except ImportError:
            continue
    import torch

    torch.set_num_threads(1)
    _torch_state = torch.get_rng_state()
    _server_path[:] = sys.path[1:]
    _server_modules.update(sys.modules)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in the forks"
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=number)
    running: dict[int, tuple[ForkingPopen, int]] = {}  # by a descriptor of the process
    while True:
        ready, _, _ = select.select([control, *running], [], [])
        for each in ready:
            if each is control:
                message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 4)
                if not message:
                    return
                process, told = _fork(json.loads(message), descriptors)
                running[os.pidfd_open(process.pid)] = process, told
            else:
                process, told = running.pop(each)
                os.close(each)
                _, status = os.waitpid(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                _tell(told, status)
                os.close(told)


def _fork(request: dict[str, Any], descriptors: Sequence[int]) -> tuple[ForkingPopen, int]:
    *streams, told = descriptors
    stdin, stdout, stderr = streams
    argv = request.pop("argv")
    process = ForkingPopen(argv, stdin=stdin, stdout=stdout, stderr=stderr, **request)
    for stream in streams:
        os.close(stream)
    _tell(told, process.pid)
    return process, told


def _tell(told: int, number: int) -> None:
    try:
        os.write(told, number.to_bytes(8, "little"))
    except BrokenPipeError:
        return  # the test doesn't wait for it


def _become(program: Program, arguments: dict[str, Any]) -> NoReturn:
    """Make this fork what a new process is at its first line, and run the program."""
    status = 1
    try:
        if arguments["start_new_session"]:
            os.setsid()
        _reset_signals()
        _take_streams([arguments[name] for name in _STREAMS])
        _forget()
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


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _take_streams(streams: Sequence[int]) -> None:
    """Have these three streams, the ones of the parent where a number is -1, and nothing else."""
    high = [-1 if fd == -1 else fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in streams]
    for number, fd in enumerate(high):
        if fd != -1:
            os.dup2(fd, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        _parents.append(old)
        how = {"mode": "w" if number else "r", "encoding": old.encoding, "errors": old.errors}
        new = os.fdopen(number, closefd=False, buffering=1 if number == 2 else -1, **how)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _forget() -> None:
    """Forget what the parent did since its imports."""
    gc.freeze()  # what the parent holds isn't this process's to close
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    for name in set(sys.modules) - _server_modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if not file.startswith((sys.prefix, sys.base_prefix, str(ROOT / "paceline"))):
            del sys.modules[name]
    random.seed()
    sys.modules["torch"].set_rng_state(_torch_state)
    sys.modules["numpy"].random.seed()


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


if __name__ == "__main__":
    main = sys.modules["__main__"]
    sys.modules[main.__spec__.name] = main  # type: ignore[union-attr]
    _serve(int(sys.argv[1]))
