"""A call of a function by other interpreters, to which it is sent by value.

A function of a notebook is in no module that they could import.

    launch()          function, arguments ──▶ call ──▶ worker 0, worker 1, …
                                           results ◀── a file each

The files are memory of the calling process, which the workers open by its number: nothing is on the
disk, and nothing is unpickled that comes from another machine.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import cloudpickle

from paceline.errors import ConfigError


class FunctionCall:
    """Function call for some workers; as a context manager, it has the memory of call and results.

    Args:
        function: what each worker calls.
        arguments: its arguments, the same in all workers.
        workers: the number of workers.

    Attributes:
        path: the file of the call, for `receive`.

    Raises:
        ConfigError: the function or an argument can't be pickled.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: Sequence[Any], workers: int
    ) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        try:
            pickled = cloudpickle.dumps((function, arguments))
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{name}, its arguments or the variables that it uses can't be sent to the workers "
                f"({reason}): create such objects inside the function."
            ) from error
        self._files = ExitStack()
        self._results = [self._open(f"result {rank}") for rank in range(workers)]
        self.path = self._open("call")
        self.path.write_bytes(pickle.dumps((sys.path, list(map(str, self._results)), pickled)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._files.close()

    def results(self) -> list[Any]:
        """Return what the workers' functions have returned, by local rank."""
        texts = (path.read_bytes() for path in self._results)
        return [pickle.loads(text) if text else None for text in texts]

    def _open(self, name: str) -> Path:
        memory = os.memfd_create(f"paceline {name}")
        self._files.callback(os.close, memory)
        return Path(f"/proc/{os.getpid()}/fd/{memory}")


class ReceivedCall:
    """Function call in a worker.

    Args:
        path: the file of the call.
        local_rank: the worker's.
    """

    def __init__(self, path: Path, local_rank: int) -> None:
        search_path, results, self._pickled = pickle.loads(path.read_bytes())
        sys.path[:] = search_path
        self._result = Path(results[local_rank])

    def make(self) -> Any:
        """Call the function, and return its result."""
        function, arguments = pickle.loads(self._pickled)
        return function(*arguments)

    def give(self, result: Any) -> str:
        """Give the result to the caller; return why it can't be, or ""."""
        try:
            pickled = cloudpickle.dumps(result)
        except Exception as error:  # of the object's own code, too
            return " ".join(str(error).split())[:200]
        self._result.write_bytes(pickled)
        return ""
