"""Fork server: starts Python programs as forks of a process that has imported torch.

    test ── argv, folder, environment, streams ──▶ server ── fork ──▶ paceline train
         ◀────────── pid, exit status ───────────                        │ fork
                                                                  worker 0, worker 1

A program that imports torch and what torch imports with its first optimizer takes five processor
seconds before it does anything; a fork takes a tenth of one. What a fork starts by `subprocess` is
forked as well, where it is a Python program of the same environment. Other programs (mpirun, bash,
ip) start `python_proxy.py` for Python, which asks the server for a fork. Everything else is real:
processes, sessions, signals, streams, exit statuses, the environment, the current folder, network
namespaces.

A fork differs from a program of its own in what happens before its first line: no import of the
package, no seed of string hashes, no interpreter flags. So each seam has one test with a real
process (`real=True`), and a program with flags or variables for its interpreter gets one always.
"""

from __future__ import annotations

import atexit
import functools
import gc
import inspect
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from paceline.data.decoding.server_process import readable
from tests.harness.compile_kernels import load_all
from tests.harness.processes import fork_child
from tests.harness.processes.huge_pages import use_huge_pages
from tests.harness.processes.python_program import BIN, ROOT, Program
from tests.harness.processes.python_proxy import NAMESPACES

PREPARED = (
    *("torch", "torch.distributed", "torch._dynamo", "torch.utils.data", "numpy", "numba"),
    *("torch.distributed.run", "sklearn.datasets", "PIL.Image", "safetensors.torch"),
    *("paceline", "paceline.cli.main", "paceline.cli.train", "paceline.cli.launch"),
    *("paceline.codecs.kernels.compiled", "paceline.cli.worker", "paceline.cli.train_launched"),
    *("paceline.api", "paceline.api.join", "paceline.api.parallelize", "paceline.api.loaders"),
    *("paceline.api.loaders.loader", "paceline.api.loaders.stream_loader", "paceline.cli.db"),
    *("paceline.data.db.create", "paceline.data.db.inspect", "paceline.observe.ledger"),
    # what these import at their first call
    *("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "encodings.idna"),
    *("torch.profiler._cupti_monitor", "torch._subclasses.schema_check_mode"),
    *("torch.utils.serialization", "rich._emoji_codes"),
)
PROXY = Path(__file__).with_name("python_proxy.py")
_CORES = os.sched_getaffinity(0)  # of the tests; one of the contracts may be on one core by now
_ARGUMENTS = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_proxies: Path | None = None  # the folder of the server of which this process is a fork
RealPopen = subprocess.Popen  # where a test replaces it


class _Popen(subprocess.Popen[Any]):
    """A `Popen` that starts Python programs of this environment in its own way."""

    _passes_descriptors = False

    def _execute_child(self, *args: Any) -> None:
        bound = _ARGUMENTS.bind(self, *args)
        arguments = bound.arguments
        environment = os.environ if arguments["env"] is None else arguments["env"]
        argv = arguments["args"]
        passed = arguments["pass_fds"] and not self._passes_descriptors
        special = arguments["preexec_fn"] or passed or not arguments["close_fds"]
        if isinstance(argv, str) or special:
            super()._execute_child(*args)  # type: ignore[misc]
            return
        program = Program.of(argv, environment)
        if program is None:
            folder = self._proxy_folder()
            own = str(folder / "python")
            arguments["args"] = [own if word == sys.executable else word for word in argv]
            path = f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}"
            arguments["env"] = {**environment, "PATH": path}
        if program is None or Program.forkable(argv, arguments["cwd"], environment) is None:
            super()._execute_child(*bound.args[1:])  # type: ignore[misc]
            return
        self.pid = self._start(program, {**arguments, "env": dict(environment)})
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(arguments[n] for n in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
            *(arguments[n] for n in ("errread", "errwrite")),
        )

    def _start(self, program: Program, arguments: dict[str, Any]) -> int:
        raise NotImplementedError

    def _proxy_folder(self) -> Path:
        raise NotImplementedError


class ForkingPopen(_Popen):
    """A `Popen` that forks this process.

    Args:
        inherited: what the fork has of the process for which it stands, as keyword arguments of
            `fork_child.run_as_new_process`.
        argv, kwargs: as for `subprocess.Popen`.
    """

    def __init__(
        self, *argv: Any, inherited: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._inherited = inherited or {}
        super().__init__(*argv, **kwargs)

    def _start(self, program: Program, arguments: dict[str, Any]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            fork_child.run_as_new_process(program, arguments, **self._inherited)
        return pid

    def _proxy_folder(self) -> Path:
        assert _proxies is not None
        return _proxies


class ChildPopen(_Popen):
    """A `Popen` that forks the test's own process, for a program that must be its child."""

    _passes_descriptors = True

    def _start(self, program: Program, arguments: dict[str, Any]) -> int:
        fork_child.record_state()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where are threads
            pid = os.fork()
        if not pid:
            atexit._clear()  # what the test's process does at its end
            files = {number: number for number in arguments["pass_fds"]}
            fork_child.run_as_new_process(program, arguments, files=files)
        return pid

    def _proxy_folder(self) -> Path:
        return server().proxies


class ServedPopen(_Popen):
    """A `Popen` that has the fork server fork: the process is the server's child."""

    def _start(self, program: Program, arguments: dict[str, Any]) -> int:
        self._status, status_fd = os.pipe()
        folder = arguments["cwd"] or os.getcwd()
        request = {
            "argv": list(map(os.fspath, arguments["args"])),
            "cwd": os.fspath(folder),
            "env": arguments["env"],
            "start_new_session": arguments["start_new_session"],
            "process_group": arguments["process_group"],
        }
        streams = [
            number if arguments[name] == -1 else arguments[name]
            for number, name in enumerate(fork_child.STREAMS)
        ]
        socket.send_fds(server().control, [json.dumps(request).encode()], [*streams, status_fd])
        os.close(status_fd)
        pid = int.from_bytes(os.read(self._status, 8), "little")
        assert pid, "the fork server ended"
        return pid

    def _proxy_folder(self) -> Path:
        return server().proxies

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if not hasattr(self, "_status"):
            return super()._try_wait(flags)  # type: ignore[misc,no-any-return]
        if flags == os.WNOHANG and not readable(self._status, 0.0):
            return 0, 0
        status = os.read(self._status, 8)
        os.close(self._status)
        assert status, "the fork server ended"
        return self.pid, int.from_bytes(status, "little")

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if not hasattr(self, "_status"):
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc,no-any-return]
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
        proxies: a folder with a `python_proxy.py` for each Python program of the environment.
    """

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.proxies = Path(tempfile.mkdtemp(prefix="paceline-forks-"))
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        quiet = {"OMP_WAIT_POLICY": "PASSIVE", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(_make_proxies(self.proxies)))
            listener.listen(64)
            own = os.sched_getaffinity(0)
            os.sched_setaffinity(0, _CORES)
            self._process = RealPopen(
                [
                    *(sys.executable, "-m", __name__),
                    *(str(theirs.fileno()), str(listener.fileno()), str(self.proxies)),
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), listener.fileno()],
                env={**environment, **threads, **quiet},
            )
            os.sched_setaffinity(0, own)
        self.pid = self._process.pid
        theirs.close()
        atexit.register(self.close)

    def close(self) -> None:
        """Let the server end."""
        self.control.close()
        self._process.wait()
        shutil.rmtree(self.proxies, ignore_errors=True)


@functools.cache
def server() -> Server:
    """Return this process's server, started at the first call."""
    return Server()


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process, which may be a fork."""
    with suppress(OSError, ValueError):  # it may end meanwhile, or have just begun to write it
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            if os.readlink(link).startswith(f"/memfd:{fork_child.ENVIRONMENT} "):
                return dict(json.loads(link.read_text()))
    return dict(process.environ())


def _make_proxies(folder: Path) -> Path:
    """Fill a folder with proxies; return where their server listens."""
    (folder / "bin").symlink_to(BIN)
    program = folder / "proxy"
    program.write_text(f"#!{sys.executable} -IS\n{PROXY.read_text()}")
    program.chmod(0o755)
    for name in os.listdir(BIN):
        if Program.of([str(BIN / name)], {}) or name.startswith("python"):
            (folder / name).symlink_to(program)
    return folder / "socket"


class _Serving:
    """The server's own side: what it has forked, for the test and for proxies."""

    def __init__(self, control: socket.socket, listener: socket.socket) -> None:
        self._control, self._listener = control, listener
        # By a pidfd of the process: it, and where its pid and status are written.
        self._running: dict[int, tuple[ForkingPopen, int]] = {}
        self._proxies: dict[socket.socket, int] = {}  # the process of each

    def serve(self) -> None:
        """Fork programs on request, until the test's process has gone."""
        while True:
            waited = [self._control, self._listener, *self._running, *self._proxies]
            for each in select.select(waited, [], [])[0]:
                if each is self._control:
                    message, descriptors, _, _ = socket.recv_fds(self._control, 1 << 20, 4)
                    if not message:
                        return
                    self._fork(json.loads(message), descriptors[:3], descriptors[3])
                elif each is self._listener:
                    self._accept_request(self._listener.accept()[0])
                elif isinstance(each, socket.socket):
                    self._end_program_of(each)
                else:
                    self._end(each)

    def _accept_request(self, proxy: socket.socket) -> None:
        """Fork what a proxy asks for, in its namespaces; or have the proxy itself run that."""
        message, descriptors, _, _ = socket.recv_fds(proxy, 1 << 20, 100)
        if not message:
            proxy.close()
            return
        request = json.loads(message)
        if Program.forkable(request["argv"], request["cwd"], request["env"]) is None:
            for descriptor in descriptors:
                os.close(descriptor)
            proxy.close()
            return
        count = len(NAMESPACES)
        files = dict(zip(request.pop("files"), descriptors[count:], strict=True))
        streams = [files.pop(number) for number in range(3)]
        others = [
            descriptor
            for descriptor, name in zip(descriptors[:count], NAMESPACES, strict=True)
            if not os.path.samestat(os.fstat(descriptor), os.stat(f"/proc/self/ns/{name}"))
        ]
        inherited = {"namespaces": others, "files": files, "ignored": request.pop("ignored")}
        request.update(inherited=inherited, start_new_session=True)
        self._proxies[proxy] = self._fork(request, streams, os.dup(proxy.fileno()))
        for descriptor in (*descriptors[:count], *files.values()):
            os.close(descriptor)

    def _fork(self, request: dict[str, Any], streams: Sequence[int], status_fd: int) -> int:
        stdin, stdout, stderr = streams
        argv = request.pop("argv")
        process = ForkingPopen(argv, stdin=stdin, stdout=stdout, stderr=stderr, **request)
        for stream in streams:
            os.close(stream)
        self._running[os.pidfd_open(process.pid)] = process, status_fd
        _write_number(status_fd, process.pid)
        return process.pid

    def _end_program_of(self, proxy: socket.socket) -> None:
        """End the program of a proxy that was killed."""
        process = self._proxies.pop(proxy)
        proxy.close()
        if process in {running.pid for running, _ in self._running.values()}:
            os.kill(process, signal.SIGKILL)

    def _end(self, descriptor: int) -> None:
        process, status_fd = self._running.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        _write_number(status_fd, status)
        os.close(status_fd)


def _write_number(status_fd: int, number: int) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the reader has ended
        os.write(status_fd, number.to_bytes(8, "little"))


def _serve(control: int, listener: int, proxies: str) -> None:
    """Prepare what programs import, and serve."""
    global _proxies
    _proxies = Path(proxies)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]  # torchrun's modules take it by name
    gc.disable()  # imports leave little garbage, and each collection visits all that they made
    for name in PREPARED:
        with suppress(ImportError):
            import_module(name)
    import torch

    load_all()
    _read_flags()
    torch.set_num_threads(1)
    fork_child.record_state()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in the forks"
    gc.collect()
    gc.freeze()
    gc.enable()
    use_huge_pages()
    _Serving(socket.socket(fileno=control), socket.socket(fileno=listener)).serve()


def _read_flags() -> None:
    """Read a command line, so that the parser has its modules and the types of the flags."""
    from paceline.cli.flags import parse
    from paceline.config.train import TrainConfig

    parse(TrainConfig, ["--train_data", "null"], prog="", description="")


if __name__ == "__main__":
    main = sys.modules["__main__"]
    sys.modules[main.__spec__.name] = main  # type: ignore[union-attr]
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
