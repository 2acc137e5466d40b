"""A device's side stream, where what is exchanged is copied and added up beside the computing.

    the caller's stream   … gradients ─┐                            ┌─▶ update, forward …
    the side stream                    └ beside ─▶ copies, sums ────┘ join

Events tell from which moment on. On a CPU there is no stream, and what a call did is done when it
returns; so the same code runs there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """A stream of its own.

    Args:
        devices: of all that is copied or added up.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._device = next((d for d in devices if d.type == "cuda"), devices[0])
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Let a block's work run beside what the caller's stream is told from here on."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let a block's work run here, whatever the caller's stream is told: a thread's own."""
        if self._side is None:
            yield
            return
        with torch.cuda.stream(self._side):
            yield

    def told(self) -> Any:
        """Return an event of what the caller's stream was told so far; None: that is done."""
        if self._side is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def mark(self) -> Any:
        """Return an event that tells when the work here so far is done; None: it is."""
        if self._side is None:
            return None
        return self._side.record_event()

    def wait_for(self, event: Any) -> None:
        """Let what is told here from now on wait for an event."""
        if self._side is not None:
            self._side.wait_event(event)

    def join(self) -> None:
        """Let the caller's stream wait for the work here so far."""
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    def finish(self) -> None:
        """Return once the work here so far is done."""
        if self._side is not None:
            self._side.synchronize()
