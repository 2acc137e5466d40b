"""Restores the entries of a checkpoint file in the objects that a run trains, in mid-run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.amp import GradScaler

from paceline.snapshots.objects import StateObjects
from paceline.snapshots.restore import reset_stages
from paceline.state.state_copy import copy_state


def restore_checkpoint(entries: Mapping[str, Any], objects: StateObjects) -> None:
    """Restore what `checkpoint_entries` returned; no replica is bound to the models.

    Objects that weren't tracked when the file was written stay as they are.

    Args:
        entries: of the file, which stay as they are.
        objects: the objects whose state it is.

    Raises:
        KeyError, RuntimeError, TypeError, ValueError: the state is another model's or optimizer's.
    """
    for pair in objects.pairs:
        model, optimizer = pair.entries
        if pair.scope.first:
            pair.model.load_state_dict(entries[model])
        pair.optimizer.load_state_dict(entries[optimizer])
        for p in pair.trained().names:
            p.grad = None
    tracked = entries[objects.tracked_entry] if objects.tracked_entry else entries
    for name, one in objects.tracked.items():
        if name in tracked:
            one.load_state_dict(copy_state(tracked[name]))
        if isinstance(one, GradScaler) and one.is_enabled():
            reset_stages(one)
