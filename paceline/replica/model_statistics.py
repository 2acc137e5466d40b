"""Running statistics of one model among several: averaged over the ranks after each step's block.

    with world.step():
        …                   a forward in training mode moves them, in another model's pass, too
    exchange                the mean over the ranks begins …
    install                 … and is installed before the next forward, step or state dict

A model that is one of several may run forward in steps that don't train it: a discriminator does in
the generator's pass. So its statistics are exchanged apart from its gradients. All ranks do that
after each block, whatever ran in it. A value that no rank has moved stays as it is, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator, Ticket
from paceline.generation.run import Run
from paceline.update.batch_norm import RunningStatistics


class ModelStatistics:
    """Running statistics of a model, exchanged by collectives of its own.

    Args:
        model: the model; without running statistics, nothing is exchanged.
        purpose: of the group that averages; its collectives match in this order.
    """

    def __init__(self, model: nn.Module, run: Run, purpose: str) -> None:
        self._statistics = RunningStatistics(model)
        self._run = run
        self._purpose = purpose
        flat = self._statistics.flat
        self._equal = None if flat is None else flat.clone()  # on all ranks
        self._pending: tuple[Tensor, Ticket] | None = None

    def exchange(self, weight: float) -> None:
        """Begin to average the present values over the ranks; collective.

        Args:
            weight: local samples / global samples; with 0 this rank's values don't count.
        """
        self.install()
        if self._equal is None or self._ranks.world_size == 1:
            return
        self._statistics.pack()
        flat = self._statistics.flat
        assert flat is not None
        packed = flat.new_zeros(2 * flat.numel())
        if weight:
            moved = (flat != self._equal).to(flat.dtype)  # also where it is NaN
            packed = torch.cat([flat * weight, moved])
        self._pending = (packed, self._ranks.all_reduce(packed))

    @property
    def _ranks(self) -> Communicator:
        return self._run.context.group("data", self._purpose)

    def install(self) -> None:
        """Install the mean, if an exchange is under way.

        Raises:
            CommError: a peer was lost, or didn't answer in time.
        """
        if self._pending is None:
            return
        (packed, ticket) = self._pending
        self._pending = None
        ticket.wait("all_reduce of the running statistics")
        mean, moved = packed.chunk(2)
        assert self._equal is not None
        self._equal = torch.where(moved > 0, mean, self._equal)
        self._statistics.replace(self._equal)

    def close(self) -> None:
        """Let go of what is under way."""
        self._pending = None
