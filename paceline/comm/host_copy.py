"""Copies of small tensors in this machine's memory, which a GPU makes while the host continues.

    copy = HostCopy(sums)       queued behind what computes them
    …                           the host queues the next step's work
    copy.values(limit)          waits for the copy's event, not for what was queued since

A read of a GPU's tensor (`tolist`, `item`, `cpu`) waits for all that the host has queued, and the
GPU has nothing to do until the host has queued more. So a step's values reach the host here only.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from paceline.comm.peer_activities import WaitLimit
from paceline.errors import CommTimeout, Message

_POLL_S = 0.0002  # an event has no wait with a limit


class HostCopy:
    """Copy of a tensor in pinned memory, with the event of its completion; on a CPU, a plain copy.

    Args:
        tensor: the tensor, which may be written again at once.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        if tensor.is_cuda and tensor.numel():
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.current_stream(tensor.device).record_event()
        else:
            # The caller may change its tensor as soon as it
            # has this copy, as it may on a GPU's stream.
            self._copy = tensor.detach().clone()

    def known(self) -> list[Any] | None:
        """Return the values if the device has computed them, without a wait; otherwise None."""
        if self._event is not None and not self._event.query():
            return None
        values: list[Any] = self._copy.tolist()
        return values

    def values(self, limit: WaitLimit) -> list[Any]:
        """Return the values, nested as the tensor's `tolist` returns them.

        Args:
            limit: of the wait for the device; its operation names the values.

        Raises:
            CommTimeout: the device hasn't computed them in time.
        """
        with limit:
            while (values := self.known()) is None:
                if limit.look():
                    raise CommTimeout(
                        Message(
                            "a GPU hasn't computed {} after {:g} s: it hangs, or needs a longer "
                            "{--timeout} ({--first_iter_timeout} at the start).",
                            limit.operation,
                            limit.seconds,
                        )
                    )
                time.sleep(_POLL_S)
        return values
