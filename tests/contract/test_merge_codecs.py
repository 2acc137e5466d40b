"""Codecs of merges between owners: nothing is lost, sums follow, residuals decay as they should.

The ranks are threads; each exchanges changes of weights for some versions.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.codecs.merge_codecs import merge_codec, return_codec
from paceline.comm.peer_activities import Timeout
from paceline.reduce.put_engine.layout import BucketSpec, Layout, Topology, lay_out
from paceline.reduce.put_engine.put_exchange import PutExchange
from tests.harness.equivalence.put_synchronizers import LIMIT
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.reference.unencoded import Unencoded
from tests.harness.twins.window import WindowGroup

LENGTHS = (7000, 3, 1, 20_000)
NUMEL = sum(LENGTHS)

MACHINES = [(1, 1), (1, 1, 1), (2, 1)]
every_topology = pytest.mark.parametrize("machines", MACHINES, ids=str)
RETURNED: dict[str, Callable[[Codec, int], Codec | None]] = {
    "default": return_codec,
    "same": lambda codec, _: None,
    "int8": lambda *_: merge_codec("int8"),
    "unencoded": lambda *_: Unencoded(),
}
PAIRS = [
    ("int4", "default"),
    ("int4", "int8"),
    ("int8", "unencoded"),
    ("topk:0.02", "default"),
    ("topk:0.02", "same"),
    ("topk:0.1:4", "default"),
    ("topk:0.02:4", "int8"),
    ("topk:0.02", "unencoded"),
]
every_pair = pytest.mark.parametrize(("text", "returned"), PAIRS)


def lay_out_bucket(
    machines: tuple[int, ...], text: str, returned: str, decay: float = 1.0
) -> Layout:
    codec = merge_codec(text)
    assert codec is not None
    spec = BucketSpec(
        lengths=LENGTHS,
        dtype=torch.float32,
        codec=codec,
        return_codec=RETURNED[returned](codec, len(machines)),
        error_decay=decay,
    )
    return lay_out([spec], Topology.of(machines))


def change(rank: int, version: int) -> Tensor:
    """Make a worker's change of weights: half of it points where all its changes do."""
    scale = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).exp()
    direction = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    random = torch.Generator().manual_seed(1000 * version + rank + 2)
    return scale * (direction + torch.randn(NUMEL, generator=random))


def weight_of(rank: int) -> float:
    return (rank + 1) / 10


def true_sum(ranks: int, version: int) -> Tensor:
    return sum(
        (weight_of(rank) * change(rank, version).double() for rank in range(ranks)),
        torch.zeros(NUMEL, dtype=torch.float64),
    )


def merge(layout: Layout, versions: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Exchange some versions; return each rank's sums, and what it still has to send, (values,)."""
    machines = tuple(len(group) for group in layout.topology.groups)
    group = WindowGroup(sum(machines), layout.size, layout.notifications, machines)
    templates, names = [[torch.zeros(n) for n in LENGTHS]], [[str(n) for n in LENGTHS]]

    def work(rank: int) -> tuple[list[Tensor], Tensor]:
        window, timeout = group.window(rank), Timeout(LIMIT, LIMIT)
        exchange, got = PutExchange(window, layout, templates, names, timeout), []
        for version in range(versions):
            exchange.begin(1.0)
            values = change(rank, version).split(list(LENGTHS))
            number = exchange.send(0, values, weight_of(rank), "a test")
            sums = exchange.wait(0, number)
            got.append(torch.cat([value for value in sums if value is not None]).clone())
        exchange.drain()
        left, (feedback,) = torch.zeros(NUMEL), exchange.feedbacks
        if feedback is not None:
            left[feedback.values] = feedback.residual
        exchange.close()
        return got, left

    results = run_ranks(sum(machines), lambda c: work(c.rank))
    return [got for got, _ in results], [left for _, left in results]


@every_topology
@every_pair
def test_what_came_and_what_is_left_are_all_that_was_sent(
    machines: tuple[int, ...], text: str, returned: str
) -> None:
    ranks, versions = sum(machines), 12
    (first, *others), left = merge(lay_out_bucket(machines, text, returned), versions)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    came, true = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for version, got in enumerate(first):
        came += got
        true += true_sum(ranks, version)
    missing = sum(left, torch.zeros(NUMEL)).double()
    assert (came + missing - true).abs().max() < true.abs().max() * 1e-6
    assert came.sub(true).norm() > true.norm() * 1e-4, "nothing was coded"


@every_topology
@every_pair
def test_sums_follow_the_true_sums(machines: tuple[int, ...], text: str, returned: str) -> None:
    ranks, versions = sum(machines), 40
    (first, *_), _ = merge(lay_out_bucket(machines, text, returned), versions)
    drift = torch.zeros(NUMEL, dtype=torch.float64)
    true, errors = drift.clone(), []
    for version, got in enumerate(first):
        drift += got - true_sum(ranks, version)
        true += true_sum(ranks, version)
        errors.append((drift.norm() / true.norm()).item())
    assert errors[-1] < errors[0] / 2.5, "errors add up"
    assert errors[-1] < 0.25


@pytest.mark.parametrize("machines", [(1, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("percent", [1, 2, 4])
def test_sums_with_more_room_lose_less_than_one_fraction_both_ways_of_as_many_bytes(
    machines: tuple[int, ...], percent: int
) -> None:
    def cost(layout: Layout) -> int:
        return sum(layout.buckets[0].traffic(0, 0))

    wider = lay_out_bucket(machines, f"topk:{percent / 100}", "default")
    both_ways = next(
        layout
        for thousandths in range(10 * percent, 500)
        for layout in [lay_out_bucket(machines, f"topk:{thousandths / 1000}", "same")]
        if cost(layout) >= cost(wider)
    )
    assert mean_error(wider) < mean_error(both_ways)


def mean_error(layout: Layout) -> float:
    """Return how far the sums of the versions so far are off, of ten versions on average."""
    (first, *others), _ = merge(layout, 10)
    drift, true = torch.zeros(2, NUMEL, dtype=torch.float64)
    errors = []
    for version, got in enumerate(first):
        drift += got - true_sum(1 + len(others), version)
        true += true_sum(1 + len(others), version)
        errors.append((drift.norm() / true.norm()).item())
    return sum(errors) / len(errors)


@pytest.mark.parametrize("machines", [(1, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize(
    ("text", "returned"), [("topk:0.02", "default"), ("topk:0.02", "same"), ("int4", "int8")]
)
def test_residuals_decay_as_the_formula_says(
    machines: tuple[int, ...], text: str, returned: str
) -> None:
    ranks, versions, decay = len(machines), 6, 0.95
    layout = lay_out_bucket(machines, text, returned, decay)
    (first, *_), left = merge(layout, versions)
    spec, bucket = layout.buckets[0].spec, layout.buckets[0]
    assert spec.codec is not None
    back = spec.return_codec or spec.codec
    for owner in range(ranks):
        shard = bucket.shard(0, owner)
        errors = torch.zeros(ranks, shard.stop - shard.start)  # of the owner: of the sums
        for version in range(versions):
            total = torch.zeros(shard.stop - shard.start)
            for rank in range(ranks):
                own = change(rank, version)[shard] * weight_of(rank)
                total += own if rank == owner else sent(spec.codec, own, errors[rank], decay)
            assert torch.equal(first[version][shard], sent(back, total, errors[owner], decay))
        for rank in range(ranks):
            assert torch.equal(left[rank][shard], errors[rank])


def sent(codec: Codec, values: Tensor, error: Tensor, decay: float) -> Tensor:
    """Return what arrives; the error becomes decay * (error + values - what arrives)."""
    data, arrived = (
        torch.zeros(codec.size(len(values)), dtype=torch.uint8),
        torch.zeros(len(values)),
    )
    codec.encode([(0, len(values), values)], 1.0, error, data, error)
    codec.decode(data, arrived)
    error *= decay
    return arrived


@every_topology
def test_the_traffic_is_what_the_codecs_take(machines: tuple[int, ...]) -> None:
    layout = lay_out_bucket(machines, "topk:0.02", "default")
    bucket = layout.buckets[0]
    codec, back = bucket.spec.codec, bucket.spec.return_codec
    assert codec is not None
    assert back is not None
    for group in range(len(machines)):
        sizes = [bucket.shard(0, number) for number in range(len(machines))]
        lengths = [shard.stop - shard.start for shard in sizes]
        own = lengths.pop(group)
        header = bucket.spec.header_size
        sent_bytes = sum(header + codec.size(n) + back.size(own) for n in lengths)
        received = sum(header + codec.size(own) + back.size(n) for n in lengths)
        assert bucket.traffic(0, group) == (sent_bytes, received)
