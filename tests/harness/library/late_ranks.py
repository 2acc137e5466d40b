"""A rank whose last operation between two steps fails, because a peer is lost: the others' doesn't.

PLACE          the operation that this rank alone doesn't complete
epoch_end      that of the epoch's last step
evaluation     the last one of an evaluation
next_epoch     the last one before the next epoch's first step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.api import script_loop
from paceline.api.loaders import evaluation
from paceline.api.world import World
from paceline.comm.communicator import gather_texts


def fail_after(world: World, place: str) -> None:
    """Let this rank's next operation at a place wait for a peer that is lost, once it is complete.

    Args:
        world: this rank's.
        place: in the table above; `epoch_end` is called within the epoch, the others after it.
    """
    owner: Any = world._loop.steps
    name = "take_snapshot"
    if place == "evaluation":
        owner = evaluation
        name = "gather_bytes"
    elif place == "next_epoch":
        owner = script_loop
        name = "gather_counts"
    complete: Callable[..., Any] = getattr(owner, name)

    def failing(*arguments: Any) -> Any:
        result = complete(*arguments)
        setattr(owner, name, complete)
        communicator = world._run.context.group("all", "steps")
        gather_texts(communicator, "", "an operation that all ranks but this end")
        return result

    setattr(owner, name, failing)
