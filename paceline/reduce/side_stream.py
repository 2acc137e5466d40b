"""A device's side stream, where gradients are copied and summed beside the computing.

    the caller's stream   … gradients ─┐                            ┌─▶ update, forward …
    the side stream                    └ beside ─▶ copies, sums ────┘ join

Events order the two. On a CPU there is no stream, and a call's work is done when it returns; so the
same code runs there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class SideStream:
    """Side stream of a GPU, and events that order its work relative to the caller's stream.

    Args:
        devices: devices of all tensors that are copied or summed; the first GPU among them is used.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._device = next((d for d in devices if d.type == "cuda"), devices[0])
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def beside(self) -> AbstractContextManager[object]:
        """Run a block's work on the side stream, after the caller's stream's work so far."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
        return self.entered()

    def entered(self) -> AbstractContextManager[object]:
        """Run a block's work on the side stream, whatever the caller's stream is given."""
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def record(self) -> Any:
        """Return an event of what the caller's stream was given so far; None: that is done."""
        if self._side is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def mark(self) -> Any:
        """Return an event of what the side stream was given so far; None: that is done."""
        if self._side is None:
            return None
        return self._side.record_event()

    def wait_for(self, event: Any) -> None:
        """Let later work of the side stream wait for an event."""
        if self._side is not None:
            self._side.wait_event(event)

    def join(self) -> None:
        """Let the caller's stream wait for the side stream's work so far."""
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    def finish(self) -> None:
        """Return once the side stream's work so far is done."""
        if self._side is not None:
            self._side.synchronize()
