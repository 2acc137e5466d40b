"""A parameter server on `torch.distributed.rpc`, as torch's own tutorials write one.

    worker    push(bucket, gradients) ──▶ server    the last worker's push: sum, update
              parameters              ◀──           to all workers at once

It has what the benchmark needs: SGD, synchronous steps, buckets; and nothing against faults.
"""

from __future__ import annotations

import os
import threading

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

TIMEOUT = 600.0  # seconds
_buckets: list[_Bucket] = []  # of this process, if it is a server


class _Bucket:
    """A part of the parameters, (values,), and the pushes of its next version."""

    def __init__(self, numel: int, workers: int) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(numel))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.01, momentum=0.9, fused=True)
        self.parameter.grad = torch.zeros(numel)
        self.workers = self.missing = workers
        self.answer: Future[Tensor] = Future()
        self.lock = threading.Lock()

    def add(self, gradients: Tensor) -> Future[Tensor]:
        assert self.parameter.grad is not None
        with self.lock:
            answer = self.answer
            self.parameter.grad.add_(gradients, alpha=1 / self.workers)
            self.missing -= 1
            if not self.missing:
                self.optimizer.step()
                self.parameter.grad.zero_()
                self.missing = self.workers
                self.answer = Future()
                answer.set_result(self.parameter.detach())
        return answer


def join(name: str, rank: int, ranks: int, store: str) -> None:
    """Connect with all workers and servers, by TCP; collective."""
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"]
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{store}",
        rpc_timeout=TIMEOUT,
        _transports=["uv"],  # not by shared memory, which doesn't mind network namespaces
        _channels=["basic"],
    )
    rpc.init_rpc(name, rank=rank, world_size=ranks, rpc_backend_options=options)


def own(sizes: list[int], workers: int) -> None:
    """Be the owner of buckets of these numbers of values, before any worker pushes."""
    _buckets.extend(_Bucket(numel, workers) for numel in sizes)


@rpc.functions.async_execution
def push(bucket: int, gradients: Tensor) -> Future[Tensor]:
    """Take a worker's gradients of a bucket; answer with its updated parameters."""
    return _buckets[bucket].add(gradients)
