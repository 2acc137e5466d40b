"""Windows of all kinds, with ranks that are threads of this process."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterable
from itertools import combinations
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch.distributed import HashStore

from paceline.comm.connection_window import ConnectionWindow, connect_window
from paceline.comm.nixl.window import nixl_window
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.comm.window import Window
from tests.harness.twins.faulty_window import Faults, FaultyWindow
from tests.harness.twins.stored_addresses import StoredAddresses
from tests.harness.twins.window import WindowGroup

T = TypeVar("T")
Make = Callable[[int], Window]  # of a rank

LIMIT = 30.0


def bootstraps(
    world_size: int,
    *,
    purpose: str = "window/1",
    limit: float = LIMIT,
    store: HashStore | None = None,
) -> list[Bootstrap]:
    """Return each rank's rendezvous in one store, a fresh one or this."""
    store = store or HashStore()
    return [
        Bootstrap(
            addresses=StoredAddresses(store),
            rank=rank,
            world_size=world_size,
            token="token",
            purpose=purpose,
            limit=limit,
        )
        for rank in range(world_size)
    ]


def tcp_window(
    bootstrap: Bootstrap, address: str, size: int, notifications: int, connections: int = 1
) -> ConnectionWindow:
    """Open a window as if each rank had a machine of its own."""
    alone = [bootstrap.rank]
    return connect_window(bootstrap, alone, address, size, notifications, connections=connections)


def shm_window(bootstrap: Bootstrap, size: int, notifications: int) -> ConnectionWindow:
    """Open a window as if all ranks had one machine."""
    return connect_window(bootstrap, bootstrap.ranks, "127.0.0.1", size, notifications)


def inprocess(world_size: int, size: int, notifications: int) -> Make:
    return WindowGroup(world_size, size, notifications).window


def faulty(world_size: int, size: int, notifications: int) -> Make:
    group = WindowGroup(world_size, size, notifications)
    return lambda rank: FaultyWindow(group.window(rank), Faults(seed=rank))


def tcp(world_size: int, size: int, notifications: int) -> Make:
    at = bootstraps(world_size)
    return lambda rank: tcp_window(at[rank], "127.0.0.1", size, notifications)


def tcp_by_three(world_size: int, size: int, notifications: int) -> Make:
    at = bootstraps(world_size)
    return lambda rank: tcp_window(at[rank], "127.0.0.1", size, notifications, connections=3)


def faulty_tcp(world_size: int, size: int, notifications: int) -> Make:
    make = tcp(world_size, size, notifications)
    return lambda rank: FaultyWindow(make(rank), Faults(seed=rank))


def shared(world_size: int, size: int, notifications: int) -> Make:
    at = bootstraps(world_size)
    return lambda rank: shm_window(at[rank], size, notifications)


def nixl(world_size: int, size: int, notifications: int) -> Make:
    at = bootstraps(world_size)
    return lambda rank: nixl_window(at[rank], "127.0.0.1", size, notifications)


def contributed(world_size: int, size: int, notifications: int) -> Make:
    """Make the windows that CONTRIBUTING.md shows as an example."""
    text = Path(__file__, "../../../../CONTRIBUTING.md").resolve().read_text()
    chapter = text[text.index("## How to add a window") :]
    names: dict[str, Any] = {}
    exec(chapter[chapter.index("```python") + 10 : chapter.index("```\n\nThen")], names)
    ends: list[list[Any]] = [[None] * world_size for _ in range(world_size)]
    for one, other in combinations(range(world_size), 2):
        ends[one][other], ends[other][one] = Pipe()
    kind = names["PipeWindow"]
    return lambda rank: kind(rank, ends[rank], size, notifications)  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[int, int, int], Make]] = {
    "inprocess": inprocess,
    "faulty": faulty,
    "tcp": tcp,
    "tcp by three connections": tcp_by_three,
    "tcp with faults": faulty_tcp,
    "shared": shared,
    "CONTRIBUTING's": contributed,
    "nixl": nixl,
}


def kinds(*left_out: str) -> list[Any]:
    """Return the kinds of windows but some as a test's parameters."""
    return installed(name for name in KINDS if not any(part in name for part in left_out))


def installed(names: Iterable[str]) -> list[Any]:
    """Return names of windows as a test's parameters; what isn't installed is skipped."""
    missing = pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None, reason="NIXL isn't installed: no windows by it"
    )
    return [pytest.param(name, marks=missing if name == "nixl" else ()) for name in names]


def run_windows(
    make: Make, world_size: int, function: Callable[[Window], T], *, close: bool = True
) -> list[T]:
    """Return each rank's result; the first error of any rank is raised, once all have ended."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    windows: dict[int, Window] = {}

    def run(rank: int) -> None:
        try:
            windows[rank] = make(rank)
            results[rank] = function(windows[rank])
        except BaseException as error:
            errors.append(error)
            for window in list(windows.values()):
                window.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for window in windows.values() if close else ():
        window.close()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]
