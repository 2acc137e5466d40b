"""What a method is to those who make steps and save them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from paceline.errors import ServerLost


class Rounds(Protocol):
    """Rounds of a method that merges weights now and then; in between, ranks have their own.

    All but `written` are equal on all ranks.

    Attributes:
        last_round: the first step of the last completed round, and the step after its end; (0, 0)
            before there is one.
        ends: why the run ends once its state is saved, without another step; None: it continues.
        written: whether a script has written parameters between two steps, other than by a load.
    """

    last_round: tuple[int, int]
    ends: ServerLost | None
    written: bool

    @property
    def unmerged(self) -> bool:
        """Whether steps were made that the merged weights don't have yet."""

    def anchors(self) -> Mapping[str, Tensor]:
        """Return the parameters of the last merge by name, flat; views."""
