"""Makes the synchronizers of ranks that are threads of this process and exchange by puts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from paceline.comm.communicator import Communicator
from paceline.comm.faulty_window import Faults, FaultyWindow
from paceline.comm.inprocess_window import WindowGroup
from paceline.comm.window import Window
from paceline.sync.bucket import Bucket
from paceline.sync.layout import Topology
from paceline.sync.notified import Notified


def notified(faults: bool, machines: Sequence[int] = ()) -> Callable[..., Any]:
    """Return what makes the synchronizer of each rank, with windows of one group a binding.

    Args:
        faults: puts are late and overtake each other.
        machines: how many ranks share memory on each; by default nobody does.
    """
    groups: dict[int, WindowGroup] = {}
    made: Counter[int] = Counter()
    lock = threading.Lock()

    def make(buckets: Sequence[Bucket], communicator: Communicator, *parts: Any) -> Notified:
        def open_window(size: int, notifications: int) -> Window:
            rank = communicator.rank
            with lock:
                number = made[rank]
                made[rank] += 1
                if number not in groups:
                    groups[number] = WindowGroup(
                        communicator.world_size, size, notifications, machines
                    )
            window = groups[number].window(rank)
            return FaultyWindow(window, Faults(seed=rank)) if faults else window

        topology = Topology.of(machines) if machines else Topology.flat(communicator.world_size)
        return Notified(buckets, open_window, *parts, topology, (30.0, 30.0))

    return make
