"""Process group for DTensors: torch's collectives, carried by the ranks along the axis "tensor".

    DTensor ── functional collective ── group's name ── TensorGroup ── context.group("tensor", …)

A torch `DeviceMesh` finds its group by a name in torch's registry, without a default process group.
The group outlives a generation: each collective asks for the present generation's communicator. So
a wait has the communicator's limit, and a lost peer is its `CommError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]  # its stub lacks one
    _create_work_from_future,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.futures import Future

from paceline.comm.communicator import Communicator, Ticket
from paceline.errors import ConfigError
from paceline.generation.run import Run
from paceline.timeline.timeline import WAIT_FOR_LAYERS

AXIS = "tensor"
PURPOSE = "layers"  # of the communicator: exchanges within forward and backward
_NAME = GroupName("paceline/tensor")
_REDUCTIONS = {"MAX": torch.amax, "MIN": torch.amin}


def tensor_mesh(run: Run) -> DeviceMesh:
    """Return torch's mesh of the ranks along the axis "tensor"; collective."""
    run.open(AXIS, PURPOSE)
    line = run.context.along(AXIS)
    group = TensorGroup(run)
    _unregister_process_group(_NAME)  # an earlier world's
    _register_process_group(_NAME, group)
    # `from_group` would look for a default process group.
    mesh = DeviceMesh(
        run.context.device.type,
        torch.arange(line.size),
        mesh_dim_names=(AXIS,),
        _init_backend=False,
        _rank=line.rank,
    )
    mesh._dim_group_names = [_NAME]
    mesh._pg_registry[_NAME] = group
    return mesh


class TensorGroup(dist.ProcessGroup):
    """Process group of the tensor ranks, over the present generation's communicator.

    A collective has ended when it returns.
    """

    def __init__(self, run: Run) -> None:
        line = run.context.along(AXIS)
        super().__init__(line.rank, line.size)  # type: ignore[call-arg]  # the stub lacks it
        self._run = run
        self._set_group_name(_NAME)

    def allreduce(  # type: ignore[override]  # its overloads aren't called
        self, tensors: list[Tensor], options: Any = None
    ) -> dist.Work:
        """Reduce each tensor over the ranks, in place."""
        for tensor in tensors:
            self._reduce(tensor, options)
        return _ended(tensors)

    allreduce_coalesced = allreduce  # type: ignore[assignment]  # its options have another name

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], owns: Sequence[Tensor], options: Any = None
    ) -> dist.Work:
        """Concatenate all ranks' tensors along the first dimension."""
        for output, own in zip(outputs, owns, strict=True):
            self._gather(own, output.chunk(self.size()))
        return _ended(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], owns: Sequence[Tensor], options: Any = None
    ) -> dist.Work:
        """Reduce over the ranks, and return this rank's part along the first dimension."""
        for output, own in zip(outputs, owns, strict=True):
            reduced = own.clone()
            self._reduce(reduced, options)
            output.copy_(reduced.chunk(self.size())[self.rank()])
        return _ended(outputs)

    def all_to_all_single(
        self, output: Tensor, own: Tensor, to: Any, of: Any, options: Any = None
    ) -> dist.Work:
        """Exchange equal parts along the first dimension."""
        if to or of:
            raise ConfigError(
                f"a DTensor of {tuple(own.shape)} is divided unevenly over "
                f"{self.size()} tensor ranks: choose a width that they divide."
            )
        everything = [torch.empty_like(own) for _ in range(self.size())]
        self._gather(own, everything)
        mine = [each.chunk(self.size())[self.rank()] for each in everything]
        output.copy_(torch.cat(mine))
        return _ended([output])

    def _reduce(self, tensor: Tensor, options: Any) -> None:
        kind = "SUM" if options is None else options.reduceOp.op.name
        if kind in ("SUM", "AVG"):
            self._wait(self._communicator().all_reduce(tensor), "sum", tensor)
            if kind == "AVG":
                tensor.div_(self.size())
            return
        if kind not in _REDUCTIONS:
            raise ConfigError(
                f"a DTensor is reduced by {kind} over the tensor ranks, which exchange sums, "
                "means, maxima and minima: compute it from these."
            )
        values = [torch.empty_like(tensor) for _ in range(self.size())]
        self._gather(tensor, values)
        tensor.copy_(_REDUCTIONS[kind](torch.stack(values), 0))

    def _gather(self, own: Tensor, into: Sequence[Tensor]) -> None:
        self._wait(self._communicator().all_gather(own.contiguous(), into), "parts", own)

    def _wait(self, ticket: Ticket, what: str, tensor: Tensor) -> None:
        timeline = self._run.context.timeline
        form = f"the {what} of {tensor.dtype} of shape {tuple(tensor.shape)} over tensor ranks"
        with timeline.span(WAIT_FOR_LAYERS):
            ticket.wait(timeline.in_step(form))

    def _communicator(self) -> Communicator:
        context = self._run.context
        communicator = context.group(AXIS, PURPOSE)
        if context.started:
            communicator.end_startup()
        return communicator


def _ended(tensors: Sequence[Tensor]) -> dist.Work:
    future: Future[list[Tensor]] = Future()
    future.set_result([*tensors])
    work: dist.Work = _create_work_from_future(future)
    return work
