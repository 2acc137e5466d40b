"""Base of synchronizers whose workers are in different steps: none receives a step's sums."""

from __future__ import annotations

from collections import Counter
from typing import Any, NoReturn

from torch import Tensor

from paceline.algorithms.data_parallel import DataParallel
from paceline.errors import ConfigError, Message


class WithoutSums(DataParallel):
    """Data-parallel synchronizer that refuses what needs all workers' gradients of one step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reads: Counter[int] = Counter()

    def reduce(self) -> None:
        """Refuse: no worker has the sums of a step."""
        self._refuse()

    def begin_again(self) -> None:
        """Refuse: nothing was reduced."""
        self._refuse()

    def expose(self, parameter: Tensor) -> None:
        """Refuse: no worker has the sums of a step."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            Message(
                "a step's gradients were used before optimizer.step(), by clipping, a GradScaler "
                "or reduce(), say, but no worker has their sums where workers are in different "
                "steps: use {--staleness} 0."
            )
        )
