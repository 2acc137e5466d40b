"""Gradients in a GPU's memory, exchanged through the CPU's: copies beside the computing.

    backward's stream   … gradients of a bucket ──┐                    ┌─▶ update, forward …
    side stream               copy to pinned memory ──┐     copy back ─┤
    staging thread                        exchange.send ┘              │
    the others, and this rank's owner          sums ──── exchange.wait ┘

The thread waits for the first copy, so that nobody who computes does. On a CPU the same code runs
without streams, and a copy is done when it returns; this is how it is tested.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CommTimeout
from paceline.reduce.exchange import Exchange
from paceline.reduce.put_engine.gradient_views import refuse_writes
from paceline.reduce.side_stream import SideStream

_CLOSE_S = 5.0


def pinned_like(tensor: Tensor) -> Tensor:
    """Make memory on the CPU that a tensor's device copies to by itself, laid out as the tensor."""
    on_cpu = torch.empty_like(tensor.detach(), device="cpu")
    return on_cpu if tensor.device.type == "cpu" else on_cpu.pin_memory()


@dataclass(kw_only=True)
class _Stage:
    """A run's memories, and how far its versions have come.

    Attributes:
        names: of its parameters, for errors.
        pinned: what is sent, a tensor a parameter, laid out as it is.
        sums: what comes back, likewise, where the parameters are.
        borrowed: the gradients that are copied, with autograd's counts of writes.
        asked: the versions that were to be sent.
        sent: those that were.
    """

    names: Sequence[str]
    pinned: Sequence[Tensor]
    sums: Sequence[Tensor]
    borrowed: list[tuple[str, Tensor, int]] = field(default_factory=list)
    asked: int = 0
    sent: int = 0


class GpuStaging:
    """An exchange of values in a device's memory by one in the CPU's.

    Args:
        exchange: takes values on the CPU, and reads them until their sums have come.
        templates: of each run, tensors of its parameters' shapes, strides and devices.
        pinned: made by `pinned_like` of them; what the exchange gets.
        names: of each run, the parameters' names.
        limits: seconds that a copy may take, in the first step and later.
        sums: of each run, where they come back to; by default to memory of this object's own.
    """

    zero_copy = True

    def __init__(
        self,
        exchange: Exchange,
        templates: Sequence[Sequence[Tensor]],
        pinned: Sequence[Sequence[Tensor]],
        names: Sequence[Sequence[str]],
        limits: tuple[float, float],
        sums: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        self._exchange = exchange
        if sums is None:
            sums = [[torch.empty_like(t.detach()) for t in tensors] for tensors in templates]
        self._streams = SideStream([tensor.device for tensors in templates for tensor in tensors])
        self._stages = [
            _Stage(names=words, pinned=copies, sums=places)
            for places, copies, words in zip(sums, pinned, names, strict=True)
        ]
        self._limit, self._later = limits
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._queue: queue.SimpleQueue[tuple[int, list[Tensor | None], float, Any] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name="staging", daemon=True)
        self._thread.start()

    def steady(self) -> None:
        """Wait less long from now on."""
        self._limit = self._later
        self._exchange.steady()

    def begin(self, *, applied: bool, scale: float) -> None:
        """Begin a step."""
        self._exchange.begin(applied=applied, scale=scale)

    def traffic(self, index: int) -> tuple[int, int]:
        """Return the bytes that go to other groups and come from them."""
        return self._exchange.traffic(index)

    def next(self, index: int) -> int:
        """Return which run to wait for first."""
        return self._exchange.next(index)

    def send(self, index: int, values: Sequence[Tensor | None], weight: float) -> None:
        """Begin to copy a run's values, which are sent once that is done."""
        stage = self._stages[index]
        stage.borrowed = [
            (name, value, value._version)
            for name, value in zip(stage.names, values, strict=True)
            if value is not None
        ]
        copies: list[Tensor | None] = []
        with self._streams.beside(), torch.no_grad():
            for value, pinned in zip(values, stage.pinned, strict=True):
                copies.append(None if value is None else pinned.copy_(value, non_blocking=True))
            done = self._streams.mark()
        stage.asked += 1
        self._queue.put((index, copies, weight, done))

    def wait(self, index: int, operation: str) -> list[Tensor | None]:
        """Return the sums, on the device.

        Raises:
            CommError: a peer was lost, or silent, or the device was.
            ConfigError: a gradient was written since it was sent.
        """
        stage = self._sent(index, operation)
        sums = self._exchange.wait(index, operation)
        borrowed, stage.borrowed = stage.borrowed, []
        refuse_writes(borrowed)
        with self._streams.beside(), torch.no_grad():
            found = [
                None if total is None else place.copy_(total, non_blocking=True)
                for total, place in zip(sums, stage.sums, strict=True)
            ]
        self._streams.join()
        return found

    def discard(self, index: int, operation: str) -> None:
        """Wait for the sums, and forget them.

        Raises:
            CommError: a peer was lost, or silent, or the device was.
        """
        stage = self._sent(index, operation)
        self._exchange.discard(index, operation)
        stage.borrowed = []

    def drain(self) -> None:
        """Serve the peers until they have all their sums."""
        self._exchange.drain()

    def close(self) -> None:
        """End the thread and the exchange."""
        self._queue.put(None)
        self._exchange.close()
        self._thread.join(_CLOSE_S)

    def _sent(self, index: int, operation: str) -> _Stage:
        """Wait until a run's last version was sent."""
        stage = self._stages[index]
        with self._changed:
            self._changed.wait_for(
                lambda: stage.sent == stage.asked or self._error is not None, self._limit
            )
        if self._error is not None:
            raise self._error
        if stage.sent < stage.asked:
            raise CommTimeout(
                f"a GPU hasn't copied {operation} to the CPU's memory after {self._limit:g} s: it "
                "hangs, or needs a longer --timeout (--first_iter_timeout in the start)."
            )
        return stage

    def _work(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                index, copies, weight, done = item
                if done is not None:
                    done.synchronize()
                self._exchange.send(index, copies, weight)
                with self._changed:
                    self._stages[index].sent += 1
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
