"""Comparison of the ranks' parameters when the last rank closes its world, without a barrier.

    rank 0    state, checksums -> store, counter 1
    rank 2    state, checksums -> store, counter 2
    rank 1    state, checksums -> store, counter 3: reads all states, and compares

A run with a run folder compares its replicas by a collective before it saves the last state.
Without one, a rank that closes its world doesn't wait for others. The last rank to close it
compares all. The states have a code of the checksums; the checksums are read where codes differ.

Scripts may write parameters after the last step, on rank 0 to test an average of them, say. A rank
whose writes autograd has counted posts nothing, and nothing is compared. It doesn't count writes
through `p.data`. So a difference is a warning where a script may have used parameters since the
last step, and an error where no rank's script has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from paceline.cluster.json_record import JsonRecord
from paceline.cluster.membership.generation import Group
from paceline.cluster.stores.store_spec import STORE_ERRORS
from paceline.cluster.stores.waiting import call_with_timeout
from paceline.errors import ReplicasDiffer
from paceline.replica.checksums import Checksums, name_ranks
from paceline.snapshots.replica_check import replicas_differ

_STORE_TIMEOUT_S = 2.0  # of the store's calls together
_USED = "Ignore this if the script wrote the parameters after the last step, through p.data, say."


@dataclass(frozen=True, kw_only=True)
class LastState(JsonRecord):
    """Last state of a rank that closes its world.

    Attributes:
        steps: the number of completed steps.
        code: of the parameters' checksums.
        used: whether the script may have used parameters since the last step.
        evaluated: how many loaders of evaluations the rank has iterated to the end.
    """

    steps: int
    code: int
    used: bool
    evaluated: int = 0


def post_and_compare(
    store: Store,
    group: Group,
    own: LastState,
    checksums: Checksums,
    report: Callable[[str], None],
) -> ReplicasDiffer | None:
    """Post this rank's last state; as the last rank, compare those of all ranks.

    Args:
        store: the run's store; if it is lost, nothing is compared.
        group: the ranks whose state is equal.
        own: this rank's last state.
        checksums: of its parameters.
        report: prints a warning, if the states differ where a script may have used parameters; or
            a note, on rank 0 or the last rank, if the store doesn't answer in time.

    Returns:
        the error, if the states differ after the same steps, and no script has used parameters.

    Raises:
        CommError: another version of Paceline has posted a state.
    """
    prefix = f"{group.generation.key_prefix}/last/{group.ranks[0]}"
    reports = group.rank == 0  # whether a timeout of this rank's is reported

    def post() -> list[bytes]:
        nonlocal reports
        with suppress(*STORE_ERRORS):  # the heartbeat has warned
            store.set(f"{prefix}/checksums/{group.rank}", json.dumps(checksums))
            store.set(f"{prefix}/state/{group.rank}", own.to_text())
            if store.add(f"{prefix}/posted", 1) == group.size:
                reports = True
                keys = [f"{prefix}/state/{rank}" for rank in range(group.size)]
                return [store.get(key) for key in keys]
        return []

    texts = call_with_timeout(_STORE_TIMEOUT_S, post)
    if texts is None and reports:
        report(
            "the ranks' last states were not compared: the store did not answer in "
            f"{_STORE_TIMEOUT_S:g} s."
        )
    posted = [LastState.from_text(text) for text in texts or ()]
    if note := evaluated_apart([one.evaluated for one in posted]):
        report(note)
    if len({one.code for one in posted}) < 2 or any(one.steps != own.steps for one in posted):
        return None
    error = replicas_differ(own.steps, _checksums(store, prefix, posted))
    if not any(one.used for one in posted):
        return error
    report(f"warning: {error} {_USED}")
    return None


def evaluated_apart(counts: Sequence[int]) -> str:
    """Return a sentence on ranks that have iterated loaders of evaluations alone; "" if none has.

    Args:
        counts: how many each rank has iterated to the end, in rank order.
    """
    most = max(counts, default=0)
    alone = [rank for rank, count in enumerate(counts) if count == most]
    others = [rank for rank, count in enumerate(counts) if count < most]
    if not others:
        return ""
    return (
        f"warning: {name_ranks(alone)} evaluated without {name_ranks(others)}: a paceline.loader() "
        "with train=False yields each rank's own part of the samples, so a score of some ranks "
        "isn't of all samples. Iterate on all ranks and sum by world.total() or world.meter(), or "
        "evaluate with a DataLoader of torch on one rank."
    )


def _checksums(store: Store, prefix: str, posted: Sequence[LastState]) -> list[Checksums]:
    """Read the checksums of all ranks; if the store doesn't answer in time, return their codes."""

    def read() -> list[Checksums]:
        return [json.loads(store.get(f"{prefix}/checksums/{i}")) for i in range(len(posted))]

    found = call_with_timeout(_STORE_TIMEOUT_S, read)
    return found or [{"the parameters": one.code} for one in posted]
