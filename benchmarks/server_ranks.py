"""A rank of `servers.py`: a worker that sends without computing, or what serves it.

    line       a plain stream of the ideal bytes between each worker and each server, both ways
    server     Paceline's, by its public interface; server:MB in buckets of that size; server-2
               with a staleness of 2, server-async asynchronous
    rpc        `rpc_server.py`; rpc:MB likewise
    ddp        torch's DistributedDataParallel of the workers alone; ddp:MB likewise

Gradients are made up: a layer's backward returns a tensor that has been there from the start. The
last ranks are the servers. They serve `line` and `rpc`; Paceline's servers are processes of their
own, `paceline serve`. Neither snapshots nor comparisons of the replicas are taken.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import rpc_server
import torch
from rank_setup import RankSetup, Variant, join_gloo, nothing, open_store
from ranks import serve
from stream import LIMIT
from table import method_of, size_of
from torch import Tensor, nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

import paceline

RUN_ID = "torchrun-servers.0"
MASTER_PORT = 29500
BUCKET_MB = 1  # of rpc and ddp, where a row names none
RPC_LIMIT = 600.0  # seconds, of a push: with many workers a step takes long
ITEM = 4  # bytes of a value
LAYER_BYTES = 2**19


@dataclass(frozen=True, kw_only=True)
class Setting(RankSetup):
    """Setting of a rank.

    Attributes:
        workers: the number of ranks that are workers; the others are servers.
        master: the address of rank 0.
        layers: the number of layers of the model, `LAYER_BYTES` each.
    """

    workers: int
    master: str
    layers: int

    @property
    def servers(self) -> int:
        """The number of servers."""
        return self.ranks - self.workers

    @property
    def server(self) -> int | None:
        """The number of this server; None: this rank is a worker."""
        return self.rank - self.workers if self.rank >= self.workers else None


class _Made(torch.autograd.Function):
    """A layer's function, whose gradient of the weights is made up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        # As any layer, it reads its weights: Paceline lets it wait for them there, and for those of
        # later layers not yet.
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, Tensor, None]:
        return above[0], ctx.gradient, None


class Layer(nn.Module):
    """A layer without computation: `LAYER_BYTES` of weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        numel = LAYER_BYTES // ITEM
        self.weight = nn.Parameter(torch.zeros(numel))
        generator = torch.Generator().manual_seed(seed)
        self.gradient = torch.randn(numel, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return x and a weight."""
        made: Tensor = _Made.apply(x, self.weight, self.gradient)
        return made


def model_of(setting: Setting) -> nn.Module:
    """Make a worker's model: no rank's gradients are those of another."""
    first = setting.rank * setting.layers
    return nn.Sequential(*[Layer(first + number) for number in range(setting.layers)])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of all rows."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def line(setting: Setting, row: str) -> Variant:
    """Stream a worker's bytes to each server, and as many back, in big calls."""
    size = setting.layers * LAYER_BYTES // setting.servers
    ends = _server_ends(setting) if setting.server is not None else _worker_ends(setting)
    threads = ThreadPoolExecutor(2 * len(ends), "stream")
    source = np.ones(size, np.uint8).data
    into = [np.ones(size, np.uint8).data for _ in ends]

    def step() -> None:
        moving: list[Future[Any]] = []
        for end, memory in zip(ends, into, strict=True):
            moving.append(threads.submit(end.sendall, source))
            moving.append(threads.submit(end.recv_into, memory, size, socket.MSG_WAITALL))
        if any(done.result() not in (None, size) for done in moving):
            raise ConnectionError("a stream ended early")

    return Variant(step=step, finish=nothing, result=list)


def _server_ends(setting: Setting) -> list[socket.socket]:
    store = open_store(setting, "line")
    with socket.create_server((setting.address, 0)) as listener:
        listener.settimeout(LIMIT)
        port = listener.getsockname()[1]
        store.set(f"server {setting.server}", f"{setting.address} {port}")
        return [_limited(listener.accept()[0]) for _ in range(setting.workers)]


def _worker_ends(setting: Setting) -> list[socket.socket]:
    store = open_store(setting, "line")
    ends = []
    for number in range(setting.servers):
        address, port = store.get(f"server {number}").decode().split()
        ends.append(_limited(socket.create_connection((address, int(port)), LIMIT)))
    return ends


def _limited(end: socket.socket) -> socket.socket:
    """Limit every wait in the kernel: Python's own time-out would cut large calls into pieces."""
    end.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", LIMIT, 0))
    return end


def staleness_of(row: str) -> int | None:
    """Return the staleness of a row of Paceline's servers: 2 of `server-2`; None: asynchronous."""
    text = method_of(row).partition("-")[2] or "0"
    return None if text == "async" else int(text)


def steps_of(row: str) -> int:
    """Return the training steps of a step of a row: what is timed begins with as many under way."""
    return 1 + (staleness_of(row) or 0)


def server(setting: Setting, row: str) -> Variant:
    """Train by Paceline's servers, as a script does."""
    if setting.server is not None:
        return Variant(step=nothing, finish=nothing, result=list)
    os.environ |= {
        "RANK": str(setting.rank),
        "WORLD_SIZE": str(setting.workers),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(setting.rank),
        "MASTER_ADDR": setting.master,
        "MASTER_PORT": str(MASTER_PORT),
        "TORCHELASTIC_RUN_ID": "servers",
    }
    world = paceline.join(snapshots=False, replica_check=False, first_iter_timeout=300, timeout=300)
    model = model_of(setting)
    optimizer = optimizer_of(model)
    sync = paceline.Server(servers=setting.servers, staleness=staleness_of(row))
    paceline.parallelize(model, optimizer, world, sync=sync, bucket_mb=size_of(row)[0])
    x = torch.zeros((), requires_grad=True)

    def step() -> None:
        with world.step(samples=1):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()

    def steps() -> None:
        for _ in range(steps_of(row)):
            step()

    return Variant(step=steps, finish=world.settle, result=lambda: [*model.parameters()])


def remote(setting: Setting, row: str) -> Variant:
    """Train by the parameter server on torch's RPC."""
    size = round((size_of(row)[0] or BUCKET_MB) * 2**20) // ITEM
    each = setting.layers * LAYER_BYTES // ITEM // setting.servers
    sizes = [min(size, each - first) for first in range(0, each, size)]
    if setting.server is not None:
        rpc_server.own(sizes, setting.workers)
    names = [*(f"worker{n}" for n in range(setting.workers))]
    names += [f"server{n}" for n in range(setting.servers)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own use of what it deprecates
        place_of = names[setting.rank], setting.rank, setting.ranks
        rpc_server.join(*place_of, f"{setting.store}.rpc", RPC_LIMIT)
    if setting.server is not None:
        return Variant(step=nothing, finish=nothing, result=list)
    gradients = torch.randn(setting.servers * each).split(sizes * setting.servers)
    parameters = [torch.zeros_like(one) for one in gradients]

    def step() -> None:
        answers = [
            rpc.rpc_async(
                names[setting.workers + number // len(sizes)],
                rpc_server.push,
                args=(number % len(sizes), gradient),
            )
            for number, gradient in enumerate(gradients)
        ]
        for answer, parameter in zip(answers, parameters, strict=True):
            parameter.copy_(answer.wait())

    return Variant(step=step, finish=nothing, result=lambda: parameters)


def ddp(setting: Setting, row: str) -> Variant:
    """Train by DistributedDataParallel among the workers."""
    if setting.server is not None:
        return Variant(step=nothing, finish=nothing, result=list)
    join_gloo(replace(setting, ranks=setting.workers), open_store(setting, row))
    bare = model_of(setting)
    optimizer = optimizer_of(bare)
    model = DistributedDataParallel(
        bare, bucket_cap_mb=size_of(row)[0] or BUCKET_MB, gradient_as_bucket_view=True
    )
    x = torch.zeros((), requires_grad=True)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Variant(step=step, finish=nothing, result=lambda: [*bare.parameters()])


MAKERS: dict[str, Callable[[Setting, str], Variant]] = {
    "line": line,
    "server": server,
    "server-2": server,
    "server-async": server,
    "rpc": remote,
    "ddp": ddp,
}

if __name__ == "__main__":
    setting = Setting(**json.loads(sys.argv[1]))
    serve(setting.rows, lambda row: MAKERS[method_of(row)](setting, row))
