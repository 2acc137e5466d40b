"""What each of four ranks of a machine holds in a step, in bytes: gradients are there once, say.

`benchmarks/memory.py` measures the same in processes, with snapshots, as multiples of the weights.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.algorithms.notified import make_notified
from paceline.algorithms.sharded import make_sharded
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.comm.communicator import Communicator
from paceline.snapshots.copier import Receiver, StateCopier
from paceline.snapshots.narrow import WithoutNarrow
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.store import SnapshotStore
from paceline.update.master_weights import narrow
from paceline.update.shard_optimizer import ShardOptimizer
from paceline.update.state_watch import plain_state
from tests.harness.equivalence.large_batch import replicate
from tests.harness.equivalence.put_synchronizers import notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step

RANKS = 4
LAYERS = 4
WEIGHTS = LAYERS * 64 * 64 * 4  # bytes in float32
MORE = 0.08  # headers and flags, and the memory of one bucket's update
# Multiples of the weights: weights + gradients + sums, which the ranks share + momenta (+ masters);
# and a snapshot's weights + momenta (+ masters), of which narrow weights aren't there.
EXPECTED = {
    "notified": (1 + 1 + 0.25 + 1, 1 + 1),
    "sharded": (1 + 1 + 0.25 + 0.25, 1 + 0.25),
    "narrow": (0.5 + 0.5 + 0.125 + 0.25 + 0.25, 0.25 + 0.25),
}


def tensors_of(tree: Any) -> list[Tensor]:
    """List the tensors of a tree of mappings and sequences."""
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree
    found = values if isinstance(tree, dict | list | tuple) else ()
    return [tensor for value in found for tensor in tensors_of(value)]


def held_bytes(replica: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Return what a rank holds beside snapshots: its windows' bytes, and all other storages."""
    buckets = replica._binding.synchronizer._exchange._buckets.first
    windows = [bucket.contribution.values for bucket in buckets]
    inside = {memory.untyped_storage().data_ptr() for memory in windows}
    spans = [range(one.data_ptr(), one.data_ptr() + one.nbytes) for one in windows]
    state = replica._binding.state
    shards = [] if state is None else state._shards._shards
    with torch._C.DisableTorchFunctionSubclass():  # no script's use, which makes them the mean
        gradients = [p.grad for p in model.parameters()]
    copies = [bucket.gradient_views._copies for bucket in buckets]
    trees = [[*model.parameters()], gradients, dict(plain_state(optimizer)), copies]
    if shards:
        values = [one.values for own in shards.fragments.values() for one in own]
        trees += [dict(shards.state), values]
    storages = {}
    for tensor in tensors_of(trees):
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if at not in inside and not any(at in span for span in spans):
            storages[at] = storage.nbytes()
    sums = sum(bucket.sums.nbytes for bucket in buckets) / RANKS
    return sum(storages.values()) + sum(one.nbytes for one in windows) + sums


@pytest.mark.parametrize("method", EXPECTED)
def test_four_ranks_hold_what_they_must_and_no_more(method: str) -> None:
    torch.manual_seed(0)
    first = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(LAYERS)])
    make = make_notified if method == "notified" else make_sharded
    kind: Any = notified(False, (RANKS,), "fp32", make)
    if method != "notified":
        kind.updater = partial(ShardOptimizer, masters=method == "narrow")

    def work(c: Communicator) -> tuple[float, float]:
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if method == "narrow":
            narrow(model.parameters(), optimizer, torch.bfloat16)
        replica = replicate(model, optimizer, c, 20_000, kind)
        held = 0.0
        for number in range(3):
            with replica_step(replica, number, 1 / RANKS):
                with torch.autocast("cpu", torch.bfloat16, enabled=method == "narrow"):
                    loss = model(torch.ones(2, 64)).sum()
                loss.backward()
                held = held_bytes(replica, model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
        store = SnapshotStore()
        name = SnapshotName("account", 3)
        masters = replica.masters
        receiver: Receiver = store if masters is None else WithoutNarrow(store, masters)
        objects = StateObjects(model=model, optimizer=optimizer)
        replica.copy_now(StateCopier(receiver, name, objects, {}))
        c.all_reduce(torch.zeros(1)).wait("all ranks")
        replica.close()
        return held / WEIGHTS, store.nbytes / WEIGHTS

    expected, snapshot = EXPECTED[method]
    for held, copied in run_ranks(RANKS, work):
        assert expected - MORE < held < expected + MORE
        assert snapshot - MORE < copied < snapshot + MORE
