"""Parameter servers of asynchronous workers in one process: one for each, over common shards.

    worker 0 ── window ── ParameterServer ─┐
    worker 1 ── window ── ParameterServer ─┼─ OwnedShards
    …                                      ┘

Each is served by a thread from its connection on, since workers connect one after another. The loss
of one worker ends all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.algorithms.served.parameter_server import ParameterServer
from paceline.errors import PeerLost

_LOOK_S = 0.5


class AsynchronousServers:
    """Parameter servers of asynchronous workers in one process: a `ParameterServer` for each."""

    def __init__(self) -> None:
        self._servers: list[ParameterServer] = []
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._done = 0  # servers whose `serve` has returned or raised
        self._errors: list[BaseException] = []
        self._ending = False

    def add(self, server: ParameterServer) -> None:
        """Serve a worker from now on."""
        self._servers.append(server)
        thread = threading.Thread(target=self._serve, args=(server,), name="server", daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def versions(self) -> list[int]:
        """For each bucket, the number of versions that have returned to every worker."""
        return [min(counts) for counts in zip(*(s.versions for s in self._servers), strict=True)]

    @property
    def nbytes(self) -> int:
        """The bytes of all buckets."""
        return self._servers[0].nbytes

    def serve(self, check: Callable[[], None]) -> None:
        """Return once all workers have announced their end; raises as `ParameterServer.serve`."""
        with self._changed:
            while self._done < len(self._servers) and not self._errors:
                self._changed.wait(_LOOK_S)
                check()
            if self._errors:
                raise self._errors[0]

    def release(self) -> None:
        """Let all workers end, which wait for it."""
        threads = [threading.Thread(target=server.release) for server in self._servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """End the threads, and the windows."""
        self._ending = True
        for server in self._servers:
            server.close()
        for thread in self._threads:
            thread.join()

    def _serve(self, server: ParameterServer) -> None:
        """Serve one worker, in a thread of its own."""
        try:
            server.serve(self._look)
        except BaseException as error:  # raised by `serve`
            with self._changed:
                self._errors.append(error)
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def _look(self) -> None:
        if self._ending:
            raise PeerLost("another worker of the server was lost.")
