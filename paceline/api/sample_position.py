"""What the next step trains: the loader's shares that no step has trained yet, or a mere count.

    loader      share ──▶ share ──▶ share ──▶ …         each handed out once, in the epoch's order
    steps         └─── step ─┘        └─ step …         a step trains all that are waiting

As a rule a step trains one share. Where a loop accumulates gradients over several batches of the
loader, its step trains several. Without a loader all steps are in one endless epoch, in which a
rank takes as many positions as it says (`samples`), or one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from paceline.comm.communicator import Communicator
from paceline.data.batch_slice import BatchSlice
from paceline.data.order import Order
from paceline.errors import ConfigError
from paceline.run.steps import Position


@dataclass(frozen=True, kw_only=True)
class WeightedSlice(BatchSlice):
    """A share whose gradient counts otherwise than by its samples.

    Attributes:
        counts: its weight.
    """

    counts: float

    @property
    def weight(self) -> float:
        """The share's part of the step."""
        return self.counts

    @classmethod
    def of(cls, place: BatchSlice, weight: float) -> WeightedSlice:
        """Give a share another weight."""
        return cls(**{f.name: getattr(place, f.name) for f in fields(place)}, counts=weight)


class SamplePosition:
    """Which samples steps train.

    Args:
        position: where the run stands; the steps move it.
        communicator: the ranks.
        device: where its tensors live.

    Attributes:
        iterating: the loader's iteration is under way.
        begun: the run was moved in this process, or could have been.
    """

    def __init__(
        self, position: Position, communicator: Communicator, device: torch.device
    ) -> None:
        self.position = position
        self.iterating = False
        self.begun = False
        self._communicator, self._device = communicator, device
        self._order: Order | None = None
        self._kept: Mapping[str, Any] | None = None  # the order in the checkpoint
        self._waiting: list[BatchSlice] = []  # handed out, and not trained yet
        self._taken = 0  # positions of the endless epoch

    @property
    def order(self) -> Order | None:
        """The order of the loader that trains, if there is one."""
        return self._order

    @property
    def epoch(self) -> int:
        """The epoch that runs, or that the loader's next iteration is."""
        return self.position.epoch + self.next_is_another

    @property
    def next_is_another(self) -> bool:
        """Whether the loader's next iteration begins another epoch."""
        return self.begun and not self.iterating and self.position.step > 0

    @property
    def at_end(self) -> bool:
        """Whether all steps of the epoch are done."""
        return self._order is not None and self.position.step >= self._order.steps

    def follow(self, order: Order) -> None:
        """Go by a loader's order from the first step on.

        Raises:
            ConfigError: there is such a loader, steps were made without one, or the checkpoint's
                had another order.
        """
        if self._order is not None:
            raise ConfigError(
                "this world has a loader that trains, and one loader says where a run stands: give "
                "train=False to loaders for evaluation."
            )
        if self._taken:
            raise ConfigError(
                f"the run has made {self.position.number} steps without a loader: make the loader "
                "before the first step, or give another run."
            )
        for name, kept in (self._kept or {}).items():
            if getattr(order, name) != kept:
                told = {"size": "the data set's length"}.get(name, name)
                raise ConfigError(
                    f"{told} is {getattr(order, name)}, and was {kept} when the checkpoint was "
                    "made: give the same, or another run."
                )
        self._order = order

    def hand_out(self, place: BatchSlice) -> None:
        """Let the next step train a share."""
        self._waiting.append(place)

    def drop(self) -> None:
        """Forget shares of an iteration that was broken off."""
        self._waiting.clear()

    def require_all_trained(self) -> None:
        """Look whether steps have trained all shares, at an epoch's end.

        Raises:
            ConfigError: no step trained the last ones.
        """
        if self._waiting:
            raise ConfigError(
                f"the epoch ended with {len(self._waiting)} batches that no world.step() trained: "
                "where you accumulate, step at the last batch too (loader.step + 1 == "
                "len(loader)); for a loop that doesn't train, give the loader train=False."
            )

    def take(self, samples: int | None) -> tuple[BatchSlice, Sequence[BatchSlice]]:
        """Return what the next step trains, and the shares before it that it trains as well.

        Args:
            samples: how many samples this rank's loss is the mean of, where the caller counts;
                collective then.

        Raises:
            ConfigError: there is no share, or the counts can't be used.
            CommError: a peer was lost, or silent.
        """
        self.begun = True
        if self._order is None:
            return self._counted(samples), ()
        if not self._waiting:
            raise ConfigError(
                "world.step() was called without a batch: call it once for each batch of the "
                "loader, inside its loop; no_sync() accumulates several backwards in one step."
            )
        *earlier, place = self._waiting
        if samples is not None:
            counts = self._counts(samples)
            return WeightedSlice.of(place, samples / sum(counts)), earlier
        return (self._accumulated(place) if earlier else place), earlier

    def trained(self) -> None:
        """Count what `take` returned as trained."""
        if self._order is None:
            self._taken = self._next
        self._waiting.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep."""
        order = None if self._order is None else asdict(self._order)
        return {"taken": self._taken, "order": order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what a checkpoint kept."""
        self._taken, self._kept = state["taken"], state["order"]

    def _accumulated(self, place: BatchSlice) -> BatchSlice:
        """Weigh several shares as one: local samples / global samples of all of them."""
        world_size = self._communicator.world_size
        if any(share.global_count < world_size for share in self._waiting):
            raise ConfigError(
                f"the batch before position {place.last} has less than a sample for each of the "
                f"{world_size} ranks and can't be accumulated with others: give it a world.step() "
                "of its own."
            )
        local = sum(share.count for share in self._waiting)
        return WeightedSlice.of(place, local / sum(share.global_count for share in self._waiting))

    def _counted(self, samples: int | None) -> BatchSlice:
        """Take positions of the endless epoch, in rank order."""
        if self._kept is not None:
            raise ConfigError(
                "the run's checkpoint was made with a loader that trains, and there is none: make "
                "it before the first step, or give another run."
            )
        world_size, rank = self._communicator.world_size, self._communicator.rank
        counts = [1] * world_size if samples is None else self._counts(samples)
        first, number = self._taken + sum(counts[:rank]), self.position.number
        self._next = self._taken + sum(counts)
        return BatchSlice(
            epoch=0,
            step=number,
            steps=number + 1,
            first=first,
            last=first + counts[rank],
            global_count=sum(counts),
        )

    def _counts(self, samples: int) -> list[int]:
        """Exchange the ranks' numbers of samples."""
        if samples < 0:
            raise ConfigError(f"samples is {samples}; it must be at least 0.")
        counts = torch.zeros(self._communicator.world_size, dtype=torch.int64, device=self._device)
        counts[self._communicator.rank] = samples
        self._communicator.all_reduce(counts).wait("the ranks' numbers of samples")
        told: list[int] = counts.tolist()
        if not sum(told):
            raise ConfigError("samples is 0 on all ranks: a step needs one at least.")
        return told
