"""A sum over ranks in several ways, without any training.

    line           a plain stream of the ideal bytes from each machine to the next, at once
    gloo           torch's all_reduce on Gloo; gloo:MB in buckets that are all under way, as DDP's
    notified       Paceline's on windows, in its own buckets; notified:MB in others, and by several
                   connections to each other machine's ranks with notified:MBxCONNECTIONS

In a sum among N machines each must send 2 (N - 1) / N of the bytes, and receive as many: that is
the *ideal*, whatever happens inside a machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rank_setup import RankSetup, Variant, join_gloo, nothing, open_store, run_of
from ranks import serve
from stream import Stream
from table import method_of, size_of
from torch import Tensor
from torch._C._distributed_c10d import Store

from paceline.comm.peer_activities import Timeout
from paceline.config.world import SyncConfig
from paceline.generation.context import WindowSpec
from paceline.reduce.put_engine.layout import BucketSpec, lay_out
from paceline.reduce.put_engine.put_exchange import PutExchange
from paceline.wiring.exchange import topology_of

ITEM = 4  # bytes of a value


@dataclass(frozen=True, kw_only=True)
class Setting(RankSetup):
    """Setting of a rank: where it runs, and how many values it has."""

    numel: int


class Summands:
    """A rank's values, (numel,) of float32, and memory for what is added up in place."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.values = torch.randn(setting.numel, generator=seeded(setting.rank))
        self.in_place = self.values.clone()

    def make(self, row: str) -> Variant:
        """Make the variant that a row such as `gloo:25` names; collective."""
        bucket_mb, connections = size_of(row)
        size = round(bucket_mb * 2**20) // ITEM if bucket_mb else None
        more = {"connections": connections} if connections > 1 else {}
        return MAKERS[method_of(row)](self, open_store(self.setting, row), size, **more)


def seeded(rank: int) -> torch.Generator:
    """Return what draws a rank's values."""
    return torch.Generator().manual_seed(rank)


def ideal_bytes(numel: int, machines: int) -> int:
    """Return the bytes that a machine must send, and receive."""
    return 2 * (machines - 1) * numel * ITEM // machines


def line(summands: Summands, store: Store, size: int | None) -> Variant:
    """Stream the ideal bytes from the machine's first rank; the others have nothing to do."""
    setting = summands.setting
    if setting.local_rank:
        return Variant(step=nothing, finish=nothing, result=list)
    machines = len(setting.ranks_by_address)
    stream = Stream(
        store,
        rank=setting.machine,
        ranks=machines,
        address=setting.address,
        size=ideal_bytes(setting.numel, machines),
    )

    def step() -> None:
        stream.start()
        stream.wait()

    return Variant(step=step, finish=nothing, result=list)


def gloo(summands: Summands, store: Store, size: int | None) -> Variant:
    """Add up by Gloo's all_reduce; each step adds up the last one's sums."""
    join_gloo(summands.setting, store)
    tensor = summands.in_place
    buckets = tensor.split(size or len(tensor))

    def step() -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            assert work is not None
            work.wait()

    def start_anew() -> None:
        tensor.copy_(summands.values)

    return Variant(step=step, finish=start_anew, result=lambda: [tensor])


def notified(summands: Summands, store: Store, size: int | None, connections: int = 1) -> Variant:
    """Add up by owners and windows; nothing waits in another order than it is sent back in."""
    size = size or SyncConfig(sync="notified").bucket_bytes // ITEM
    buckets = [[torch.from_numpy(part.numpy())] for part in summands.values.split(size)]
    specs = [BucketSpec(lengths=(len(part),), dtype=part.dtype) for (part,) in buckets]
    context = run_of(summands.setting, store).context
    layout = lay_out(specs, topology_of(context, alone=False))
    spec = WindowSpec(connections=connections)
    window = context.window("gradients", spec, layout.size, layout.notifications)
    names = [("values",)] * len(buckets)
    exchange = PutExchange(window, layout, buckets, names, Timeout(*context.limits))
    sums: list[Tensor] = []

    def step() -> None:
        sums.clear()
        versions = [exchange.send(i, bucket, 1.0, "the sum") for i, bucket in enumerate(buckets)]
        for index, version in reversed([*enumerate(versions)]):
            sums[:0] = filter(torch.is_tensor, exchange.wait(index, version))

    return Variant(step=step, finish=nothing, result=lambda: [torch.cat(sums)])


MAKERS: dict[str, Callable[..., Variant]] = {
    "line": line,
    "gloo": gloo,
    "notified": notified,
}

if __name__ == "__main__":
    setting = Setting(**json.loads(sys.argv[1]))
    serve(setting.rows, Summands(setting).make)
