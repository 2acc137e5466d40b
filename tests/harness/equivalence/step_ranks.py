"""The ranks of `step_files.py`: two machines that train by the public library and watch themselves.

    PYTHONPATH=CHECKOUT python -P tests/harness/equivalence/step_ranks.py FOLDER PORT

Each rank writes FOLDER/RANK.json: the functions of `paceline` that its steps run, by file. The file
imports nothing of `tests`, so that `paceline` can be any checkout's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from numba.core.dispatcher import Dispatcher
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

STEPS = range(14, 18)  # counted; the first steps are over, and nothing is tried any more
ALL_STEPS, BATCH = 20, 8
LIMIT = 240.0  # numba may have to compile first
PACKAGE = Path(paceline.__file__).parent


class Watch:
    """Notes which functions of a package execute a line while it is on, in any thread.

    Python's own tracing shows each line of each thread that Python started. Code that numba has
    compiled shows none: where such a function is called, or still runs, it counts, and so does
    each compiled function that its code names.

    Args:
        package: the folder of the package's files.

    Attributes:
        on: whether what runs is noted.
    """

    def __init__(self, package: Path) -> None:
        self.on = False
        self._package = package
        self._prefix = f"{package}/"
        self._seen: set[tuple[str, str]] = set()
        self._running: Counter[FunctionType] = Counter()  # compiled functions, by their sources
        self._lock = threading.Lock()

    @property
    def functions(self) -> dict[str, list[str]]:
        """What was noted: qualified names, by the path of the file in the package."""
        found = defaultdict(list)
        for file, name in sorted(self._seen):
            found[str(Path(file).relative_to(self._package))].append(name)
        return dict(found)

    def watch_threads(self) -> None:
        """Trace the threads that start from now on, and what numba compiles from now on."""
        threading.settrace(self._enter)
        call = Dispatcher.__call__

        def noted(dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
            with self._compiled(dispatcher.py_func), untraced():  # numba may compile now
                return call(dispatcher, *args, **kwargs)

        Dispatcher.__call__ = noted

    def begin(self) -> None:
        """Note what runs from here on, this thread's new calls included."""
        with self._lock:
            self.on = True
            for function in self._running:
                self._note_compiled(function)
        sys.settrace(self._enter)

    def end(self) -> None:
        """Note nothing more."""
        sys.settrace(None)
        with self._lock:
            self.on = False

    @contextmanager
    def _compiled(self, function: FunctionType) -> Iterator[None]:
        with self._lock:
            self._running[function] += 1
            if self.on:
                self._note_compiled(function)
        try:
            yield
        finally:
            with self._lock:
                self._running[function] -= 1
                self._running += Counter()  # only those that run

    def _note_compiled(self, function: FunctionType) -> None:
        for reached in named_by(function):
            self._note(reached.__code__, reached.__globals__)

    def _enter(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        """Trace the lines of the package's functions, and of no others."""
        if not self._file(frame.f_code, frame.f_globals).startswith(self._prefix):
            return None
        return self._line(frame, event, None)

    def _line(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        if self.on:
            self._note(frame.f_code, frame.f_globals)
        return self._line

    def _note(self, code: CodeType, scope: dict[str, Any]) -> None:
        file = self._file(code, scope)
        if file.startswith(self._prefix):
            self._seen.add((file, code.co_qualname))

    @staticmethod
    def _file(code: CodeType, scope: dict[str, Any]) -> str:
        """Return a function's file; of one that dataclasses made, its class's file."""
        if code.co_filename.startswith("<"):
            return str(scope.get("__file__", ""))
        return code.co_filename


@contextmanager
def untraced() -> Iterator[None]:
    """Let this thread's trace rest."""
    trace = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(trace)


def named_by(function: FunctionType) -> set[FunctionType]:
    """Return a compiled function's source, and those of all that it names, and so on."""
    found: set[FunctionType] = set()
    waiting = [function]
    while waiting:
        source = waiting.pop()
        if source not in found:
            found.add(source)
            waiting += _sources(source)
    return found


def _sources(function: FunctionType) -> Iterator[FunctionType]:
    names = function.__code__.co_names
    values = [function.__globals__.get(name) for name in names]
    values += [cell.cell_contents for cell in function.__closure__ or ()]
    modules = [value for value in values if isinstance(value, ModuleType)]
    values += [getattr(module, name, None) for module in modules for name in names]
    for value in values:
        source = getattr(value, "py_func", None) or getattr(value, "_defn", None)  # an intrinsic's
        if isinstance(source, FunctionType):
            yield source


def main(folder: Path, port: int) -> int:
    """Fork both ranks off this process, which has imported all; return 0 if both end well."""
    assert PACKAGE.parent == Path(os.environ["PYTHONPATH"]), f"paceline came from {PACKAGE}"
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU()),
        *(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=run_rank, args=(rank, port, folder, model, optimizer))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


def run_rank(
    rank: int, port: int, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Train as the only process of machine `rank`, and write what the steps ran."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        GROUP_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    watch = Watch(PACKAGE)
    watch.watch_threads()
    train(model, optimizer, watch)
    (folder / f"{rank}.json").write_text(json.dumps(watch.functions))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, watch: Watch) -> None:
    """Train as the guide's loop does; watch `STEPS`, from each step's begin to the next one's."""
    data = TensorDataset(torch.randn(ALL_STEPS * BATCH, 32), torch.arange(ALL_STEPS * BATCH) % 3)
    known = signature(paceline.join).parameters
    options = {name: False for name in ("snapshots", "replica_check") if name in known}
    limits = {"timeout": LIMIT, "first_iter_timeout": LIMIT}
    with paceline.join(device="cpu", **limits, **options) as world:
        assert (world.world_size, world.local_world_size) == (2, 1), "not on two machines"
        paceline.parallelize(model, optimizer, world, sync="notified", wire="int8", bucket_mb=0.01)
        loader = paceline.loader(data, batch_size=BATCH, world=world)
        for number, (x, y) in enumerate(loader):
            if number == STEPS.start:
                watch.begin()
            if number == STEPS.stop:
                watch.end()
            with world.step():
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
