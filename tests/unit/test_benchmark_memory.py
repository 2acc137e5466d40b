"""The benchmark of memory: what each owner holds, read from the objects, and its table."""

from __future__ import annotations

import torch
from torch import nn

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.comm.single_rank import SingleRankCommunicator
from paceline.reduce.buckets import partition
from paceline.reduce.collectives import Collectives
from paceline.snapshots.store import SnapshotStore
from tests.harness.documents.benchmark_runs import load

memory = load("memory")
rank = load("memory_rank")

SMAPS = """\
7f0000000000-7f0000100000 rw-s 00000000 00:01 7 /memfd:paceline window of rank 0 (deleted)
Size:               1024 kB
Rss:                 800 kB
Pss:                 400 kB
Pss_Dirty:           400 kB
7f0000100000-7f0000200000 rw-p 00000000 00:00 0 [heap]
Pss:                 900 kB
7f0000200000-7f0000300000 rw-s 00000000 00:01 8 /memfd:paceline window of rank 1 (deleted)
Pss:                  25 kB
"""


def test_pages_of_windows_count_by_this_processs_part_of_them() -> None:
    assert rank.window_bytes(SMAPS) == 425 * 1024


def test_each_owner_holds_the_bytes_of_its_tensors_and_shared_ones_count_once() -> None:
    model = nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    store = SnapshotStore()
    store.open(SnapshotName("memory/1", 1))
    store.add(SnapshotName("memory/1", 1), {"parameters": dict(model.named_parameters())})
    buckets = partition({model.weight: "weight"}, {model.weight: 0}, 4000)
    staging = Collectives(buckets, SingleRankCommunicator(), None)
    found = rank.owners(model, optimizer)
    assert staging.traffic
    assert found["weights"] == found["gradients"] == 4000
    # Other tests may have left some of what is found by its class.
    assert found["optimizer"] >= 4000
    assert found["snapshots"] >= store.nbytes == 4000
    assert found["staging"] >= 4004  # with the parameter's count
    # A view of the weights is no memory of its own.
    model.weight.grad = model.weight.detach().view(10, 100)
    assert rank.owners(model, optimizer)["gradients"] == 0


def test_a_model_of_flat_layers_has_the_megabytes_that_are_asked_for() -> None:
    with torch.device("meta"):
        model = rank.model_of(100)
    assert abs(sum(p.numel() * 4 for p in model.parameters()) - 100e6) < 3e6


def test_the_rest_is_what_the_peak_has_besides_the_owners() -> None:
    rounds = [
        {"peak": peak, **dict.fromkeys(rank.OWNERS, 0.0), "weights": 1.0} for peak in (2, 3, 9)
    ]
    row, ranks, peak, weights, *_, rest = memory.line_of("notified", 4, rounds)
    assert (row, ranks, peak, weights, rest) == ("notified", "4", "3.00", "1.00", "2.00")
