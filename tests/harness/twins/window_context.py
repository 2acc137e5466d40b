"""Twin of a generation's context, whose windows a test opens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.comm.window import Window
from paceline.generation.context import GenerationContext, WindowSpec
from tests.harness.processes.worlds import world_of

OpenWindow = Callable[[int, int], Window]  # of a size and a number of notifications


class WindowContext(GenerationContext):
    """Context of one rank that opens no connections but windows.

    Args:
        open_window: opens them.
        limit: seconds that waits may take.
    """

    def __init__(self, open_window: OpenWindow, limit: float) -> None:
        super().__init__(world_of(), device=torch.device("cpu"), limits=(limit, limit))
        self._open_window = open_window

    def window(self, purpose: str, spec: WindowSpec, size: int, notifications: int) -> Window:
        return self._open_window(size, notifications)
