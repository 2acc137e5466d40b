"""Guard against writes that would be lost: to sent gradients, and to parameters before an update.

Gradients travel during backward, and a parameter's update waits for the next forward. A write in
between changes nothing that the other ranks receive, or is overwritten by the update. Autograd
counts the writes of each tensor in `Tensor._version`; comparing the counts costs some 50
microseconds a step for a ResNet-50. Tensors that share memory share their count, too. So of a
gradient that is a view, only a replacement is detected. Of parameters that share their storage,
only the gradients are guarded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket


class WriteGuard:
    """Guard against lost writes: compares autograd's version counters with recorded ones.

    Args:
        buckets: buckets of the guarded parameters, which are indexed 0, 1, …, one bucket after
            another.
        make_error: makes the error for a lost write, from the parameter's name.
    """

    def __init__(self, buckets: Sequence[Bucket], make_error: Callable[[str], ConfigError]) -> None:
        self._parameters = [p for bucket in buckets for p in bucket.parameters]
        self._names = [name for bucket in buckets for name in bucket.names]
        self._make_error = make_error
        self._noted: dict[int, tuple[Tensor, int | None, torch.dtype]] = {}
        self._ends = list(accumulate(len(bucket.parameters) for bucket in buckets))
        memories = [p.untyped_storage().data_ptr() for p in self._parameters]
        uses = Counter(memories)
        self._unshared = [i for i, memory in enumerate(memories) if uses[memory] == 1]  # indices

    def note(self, index: int, tensor: Tensor) -> None:
        """Take a tensor's present version as the one that counts."""
        version = None if tensor._is_view() else tensor._version
        self._noted[index] = (tensor, version, tensor.dtype)

    def note_parameters(self) -> None:
        """Take the present versions of all parameters that don't share memory."""
        for index in self._unshared:
            self.note(index, self._parameters[index])

    def check(self, index: int, tensor: Tensor | None) -> None:
        """Compare a tensor with the one that was noted, if any, and forget that one.

        Raises:
            ConfigError: the tensor was written, converted, replaced or removed.
        """
        noted = self._noted.pop(index, None)
        if noted is None:
            return
        known, version, dtype = noted
        if tensor is known and tensor.dtype is dtype and version in (None, tensor._version):
            return
        raise self._make_error(self._names[index])

    def check_gradients(self) -> None:
        """Compare all noted gradients with the parameters' present ones.

        Raises:
            ConfigError: a gradient was written, replaced or removed.
        """
        for index in list(self._noted):
            self.check(index, self._parameters[index].grad)

    def check_parameters(self, unit: Sequence[Bucket]) -> None:
        """Compare the parameters of some buckets with their noted versions.

        Raises:
            ConfigError: a parameter was written or converted.
        """
        for bucket in unit:
            end = self._ends[bucket.index]
            for index in range(end - len(bucket.parameters), end):
                self.check(index, self._parameters[index])

    def clear(self) -> None:
        """Forget all noted tensors."""
        self._noted.clear()


def late_write(name: str) -> ConfigError:
    """Return the error for a parameter that was written before its update was installed."""
    return ConfigError(
        f"{name} was written while its update was still pending: optimizer.step() starts the "
        "update, and the next forward installs it. Call settle() after optimizer.step(), then "
        "write."
    )
