"""Gradients in a GPU's memory, exchanged through the CPU's: copies beside the computing.

    backward's stream   … gradients of a bucket ──┐                    ┌─▶ update, forward …
    side stream               copy to pinned memory ──┐     copy back ─┤
    staging thread                        exchange.send ┘              │
    the shards' owners                         sums ──── exchange.wait ┘

The thread waits for the first copy, so that the thread that computes need not. On a CPU the same
code runs without streams, and a copy is done when it returns; so it is tested.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.comm.peer_activities import Timeout
from paceline.errors import CommTimeout, Message
from paceline.reduce.exchange import Exchange
from paceline.reduce.put_engine.gradient_views import check_unwritten
from paceline.reduce.side_stream import SideStream

_CLOSE_S = 5.0


def pinned_like(tensor: Tensor) -> Tensor:
    """Allocate pinned CPU memory, with the tensor's strides, that its device can copy to."""
    on_cpu = torch.empty_like(tensor.detach(), device="cpu")
    return on_cpu if tensor.device.type == "cpu" else on_cpu.pin_memory()


@dataclass(kw_only=True)
class _Stage:
    """Bucket state of the staged exchange: pinned buffers, sums and versions.

    Attributes:
        names: the parameters' names, for errors.
        pinned: the values to send, one pinned tensor per parameter, with the parameter's strides.
        sums: the returned sums, one tensor per parameter, on the parameters' device.
        borrowed: for each gradient that is being copied: the parameter's name, the gradient, and
            its autograd version counter when it was borrowed.
        operation: description of the most recent version, for errors.
        queued: the number of versions (exchanges of this bucket, counted from 1) that were given to
            the staging thread.
        sent: the number of versions that the staging thread has sent; that thread writes it.
    """

    names: Sequence[str]
    pinned: Sequence[Tensor]
    sums: Sequence[Tensor]
    borrowed: list[tuple[str, Tensor, int]] = field(default_factory=list)
    operation: str = ""
    queued: int = 0
    sent: int = 0


class GpuStaging:
    """Exchange of GPU gradients through pinned CPU memory.

    Args:
        exchange: exchange of CPU tensors; it reads the tensors in place until their sums have
            arrived.
        templates: for each bucket, tensors of its parameters' shapes, strides and devices.
        pinned: the pinned buffers that `pinned_like(templates)` returned; they are passed to
            `exchange`.
        names: for each bucket, the parameters' names.
        timeout: timeout of each copy.
        sums: for each bucket, tensors on the device that receive the sums; by default, new ones.
    """

    zero_copy = True

    def __init__(
        self,
        exchange: Exchange,
        templates: Sequence[Sequence[Tensor]],
        pinned: Sequence[Sequence[Tensor]],
        names: Sequence[Sequence[str]],
        timeout: Timeout,
        sums: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        self._exchange = exchange
        self._timeout = timeout
        self.traffic = exchange.traffic
        self.first_to_wait_for = exchange.first_to_wait_for
        self.begin = exchange.begin
        self.drain = exchange.drain
        if sums is None:
            sums = [[torch.empty_like(t.detach()) for t in tensors] for tensors in templates]
        self._streams = SideStream([tensor.device for tensors in templates for tensor in tensors])
        self._stages = [
            _Stage(names=bucket_names, pinned=copies, sums=on_device)
            for on_device, copies, bucket_names in zip(sums, pinned, names, strict=True)
        ]
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._queue: queue.SimpleQueue[tuple[int, list[Tensor | None], float, Any] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name="staging", daemon=True)
        self._thread.start()

    def send(
        self, index: int, values: Sequence[Tensor | None], weight: float, operation: str
    ) -> int:
        """Begin to copy a bucket's values, which are sent once that is done."""
        stage = self._stages[index]
        stage.operation = operation
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
        stage.queued += 1
        self._queue.put((index, copies, weight, done))
        return stage.queued

    def wait(self, index: int, version: int) -> list[Tensor | None]:
        """Return the sums, on the device.

        Raises:
            CommError: a peer was lost, or a wait for a peer or for the device timed out.
            ConfigError: a gradient was written since it was sent.
        """
        stage = self._sent(index, version)
        sums = self._exchange.wait(index, version)
        borrowed = stage.borrowed
        stage.borrowed = []
        check_unwritten(borrowed)
        with self._streams.beside(), torch.no_grad():
            found = [
                None if total is None else on_device.copy_(total, non_blocking=True)
                for total, on_device in zip(sums, stage.sums, strict=True)
            ]
        self._streams.join()
        return found

    def abandon(self, index: int, version: int | None) -> None:
        """Wait for the sums if `wait` hasn't, and let the step leave no trace; raises as `wait`."""
        stage = self._stages[index] if version is None else self._sent(index, version)
        self._exchange.abandon(index, version)
        stage.borrowed = []

    def close(self) -> None:
        """End the thread and the exchange."""
        self._queue.put(None)
        self._exchange.close()
        self._thread.join(_CLOSE_S)

    def _sent(self, index: int, version: int) -> _Stage:
        """Wait until a bucket's version was sent."""
        stage = self._stages[index]

        def sent() -> bool:
            return stage.sent >= version or self._error is not None

        with self._timeout.limit(stage.operation) as limit:
            while not sent() and not limit.look():
                with self._changed:
                    self._changed.wait_for(sent, limit.slice())
        if self._error is not None:
            raise self._error
        if stage.sent < version:
            raise CommTimeout(
                Message(
                    "a GPU hasn't copied {} to the CPU's memory after {:g} s: it hangs, or needs a "
                    "longer {--timeout} ({--first_iter_timeout} at the start).",
                    stage.operation,
                    self._timeout.seconds,
                )
            )
        return stage

    def _work(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                index, copies, weight, done = item
                if done is not None:
                    done.synchronize()
                self._exchange.send(index, copies, weight, self._stages[index].operation)
                with self._changed:
                    self._stages[index].sent += 1
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
