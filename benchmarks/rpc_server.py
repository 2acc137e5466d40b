"""A parameter server on `torch.distributed.rpc`, as torch's tutorials write one: SGD, synchronous.

worker ── push(bucket, gradients) ──▶ server: the last push is answered to all with parameters
"""

from __future__ import annotations

import os
import threading

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

_buckets: list[_Bucket] = []  # of this process, if it is a server


class _Bucket:
    """A part of the parameters, (values,), and the pushes of its next version."""

    def __init__(self, numel: int, workers: int) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(numel))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.01, momentum=0.9, fused=True)
        self.sum = self.parameter.grad = torch.zeros(numel)
        self.workers = self.missing = workers
        self.answer: Future[Tensor] = Future()
        self.lock = threading.Lock()

    def add(self, gradients: Tensor) -> Future[Tensor]:
        with self.lock:
            answer = self.answer
            self.sum.add_(gradients, alpha=1 / self.workers)
            self.missing -= 1
            if not self.missing:
                self.optimizer.step()
                self.sum.zero_()
                self.missing = self.workers
                self.answer = Future()
                answer.set_result(self.parameter.detach())
        return answer


def join(name: str, rank: int, ranks: int, store: str, limit: float) -> None:
    """Connect with all workers and servers; by TCP, as shared memory passes namespaces by."""
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"]
    by_tcp = {"init_method": f"file://{store}", "_transports": ["uv"], "_channels": ["basic"]}
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=limit, **by_tcp)
    rpc.init_rpc(name, rank=rank, world_size=ranks, rpc_backend_options=options)


def own(sizes: list[int], workers: int) -> None:
    """Be the owner of buckets of these numbers of values, before any worker pushes."""
    _buckets.extend(_Bucket(numel, workers) for numel in sizes)


@rpc.functions.async_execution
def push(bucket: int, gradients: Tensor) -> Future[Tensor]:
    """Take a worker's gradients of a bucket; answer with its updated parameters."""
    return _buckets[bucket].add(gradients)
