"""Queue of a DataLoader's worker processes, in which no error is lost because it can't be pickled.

Torch's workers put (number, batch) or (number, error) into a queue of `multiprocessing`, which
pickles in a thread of its own. What can't be pickled is dropped there, and the training process
waits until its limit:

    worker   batch or error --> pickled in a thread --x  dropped; torch waits
                                                    `-->  what is wrong with it, in words

`as_context` makes the context that a DataLoader takes for its processes and queues.
"""

from __future__ import annotations

import multiprocessing
import pickle
import re
from contextlib import suppress
from copy import copy
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from typing import Any

from torch._utils import ExceptionWrapper

from paceline.errors import DataError

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object in a message


class _Unsent(ExceptionWrapper):
    """Error of a batch that can't be sent; torch raises it in the training process.

    Args:
        reason: why it can't be pickled.
    """

    def __init__(self, reason: str) -> None:
        super().__init__((DataError, DataError(reason), None))  # type: ignore[no-untyped-call]
        self._reason = _ADDRESS.sub("", reason)

    def reraise(self) -> None:
        raise DataError(
            f"a batch can't be sent from the process that loads it ({self._reason}): let the data "
            "set and collate_fn return tensors, numbers, strings and containers of these, or use "
            "num_workers=0."
        )


class ResultQueue(Queue):  # type: ignore[type-arg]
    """Queue that replaces what can't be pickled by a description of it."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        match item:
            case (_, ExceptionWrapper() as error) if not _can_be_raised(error.exc_type):
                # torch makes the error anew in the training process
                # by its class, which may need other arguments.
                error.exc_type = RuntimeError  # its message has the type's name, text and traceback
        super().put(item, block, timeout)

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        """Send a description; multiprocessing calls this in its thread where pickling fails."""
        match item:
            case (number, _):
                with suppress(ValueError):  # closed: the process ends
                    # Without the address that pickle gives of an object.
                    self.put((number, _Unsent(re.sub(r" at 0x[0-9a-f]+", "", str(error)))))
            case _:
                super()._on_queue_feeder_error(error, item)  # type: ignore[misc]


def as_context(method: str) -> BaseContext:
    """Return the context of a start method, whose queues are those of this module."""
    context = copy(multiprocessing.get_context(method))
    context.Queue = partial(ResultQueue, ctx=context)  # type: ignore[method-assign]
    return context


def _can_be_raised(kind: Any) -> bool:
    """Return whether an exception of a class can be sent, and made anew as torch does."""
    try:
        pickle.dumps(kind)
        if getattr(kind, "message", None):
            kind(message="")
        else:
            kind("")
    except Exception:
        return False
    return True
