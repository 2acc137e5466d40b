"""Names of the parts of a model's and an optimizer's state, in snapshots and their copies.

Of several models and optimizers, a snapshot has the parts of the first pair by their own names, and
those of pair k by "parameters k", "buffers k", …; the position is the first one's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

POSITION = "position"
TRACKED = "tracked"
PARAMETERS = "parameters"
REQUIRES_GRAD = "requires_grad"
BUFFERS = "buffers"
EXTRA = "extra_state"
OPTIMIZER = "optimizer"
GROUPS = "param_groups"
OTHER = "other_optimizer_state"
RANK = "rank"
LOCAL = "local"
SHARED = "shared"  # of averaged weights: a worker's own, and what all have alike
ENTRIES = "entries"
SAVED = "saved"  # for checkpoint files only
DIVISION = "division"  # of a divided snapshot: which part each parameter is in
LOCAL_BUFFERS = "local_buffers"  # names of buffers that aren't compared between ranks
PARTS = (POSITION, TRACKED, PARAMETERS, REQUIRES_GRAD, BUFFERS, EXTRA, OPTIMIZER, GROUPS, OTHER)
# Name among the tracked objects of an optimizer that has a state dict of its own.
OWN_OPTIMIZER = "the optimizer"


def part_suffix(pair: int) -> str:
    """Return what the names of a pair's parts end in."""
    return f" {pair + 1}" if pair else ""


def parts_of(state: Mapping[str, Mapping[Any, Any]], pair: int) -> Mapping[str, Mapping[Any, Any]]:
    """Return the parts that a snapshot has of one pair, by their own names."""
    parts = (*PARTS, RANK, ENTRIES, SAVED)
    own = {part: part + part_suffix(pair) for part in parts}
    return {part: state[name] for part, name in own.items() if name in state}
