"""Order that a script's sampler draws: positions of which two may name one sample.

    sampler or weights ── rank 0 draws an epoch ──▶ all ranks ──▶ batch t: [t B, (t + 1) B)

Each epoch is drawn once. The random streams of torch, numpy and Python, and the sampler's own
`generator`, are seeded by (seed, epoch) for that, so that an epoch can be drawn again by another
process. A sampler with further state can't repeat an epoch, so its drawn order is a part of the
run's position, which snapshots and checkpoints have.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler

from paceline.comm.communicator import Communicator, broadcast_state
from paceline.data import splitmix
from paceline.data.order import Indices, Order
from paceline.data.seeded_dataset import kept_streams, seed_streams
from paceline.errors import ConfigError, many

_SAMPLER = 8  # a purpose of random streams
_LONGEST = 64  # times the data set; a sampler that draws more is taken for an endless one
_WHAT = "the sampler's order, which rank 0 draws"


class SamplerDraws:
    """Draws of a sampler, an epoch at a time: rank 0's, on all ranks.

    Args:
        sampler: yields samples' numbers; rank 0's is used.
        records: number of samples of the data set.
        seed: of what the sampler draws at random.

    Raises:
        ConfigError: the sampler makes batches, divides samples itself, or can be read only once.
    """

    def __init__(self, sampler: Iterable[Any], records: int, seed: int) -> None:
        _require_plain(sampler)
        self._sampler = sampler
        self._records = records
        self._seed = seed
        self._generator = getattr(sampler, "generator", None)
        if not isinstance(self._generator, torch.Generator):
            self._generator = None
        self._own = 0 if self._generator is None else self._generator.initial_seed()
        self._drawn: tuple[int, Indices] | None = None  # an epoch and its order

    def indices(self, epoch: int) -> Indices:
        """Return the samples of an epoch, which was the last to be drawn, in their order."""
        assert self._drawn is not None
        assert self._drawn[0] == epoch
        return self._drawn[1]

    def draw(self, epoch: int, communicator: Communicator) -> int:
        """Let all ranks have the order of an epoch; return its length. Collective.

        Raises:
            ConfigError: the sampler doesn't draw samples of the data set, or another number of them
                than in the epoch before; on all ranks.
        """
        state: dict[str, Any] = {}
        if communicator.rank == 0:
            try:
                state = {"indices": torch.from_numpy(self._order_of(epoch))}
            except ConfigError as error:
                # The others wait in the broadcast: they get the reason instead of a timeout.
                state = {"error": str(error)}
        if communicator.world_size > 1:
            state = broadcast_state(communicator, state, _WHAT)
        if "error" in state:
            raise ConfigError(state["error"])
        indices: Indices = state["indices"].numpy()
        self._drawn = epoch, indices
        return len(indices)

    def state_dict(self) -> dict[str, Any]:
        """Return the last epoch that was drawn."""
        if self._drawn is None:
            return {}
        epoch, indices = self._drawn
        return {"epoch": epoch, "indices": torch.from_numpy(indices)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take an epoch's order as drawn, unless its samples aren't those of the data set."""
        indices = state["indices"].numpy()
        # A data set that has become smaller since has another order; the epoch is drawn anew.
        if indices.max() < self._records:
            self._drawn = state["epoch"], indices

    def _order_of(self, epoch: int) -> Indices:
        if self._drawn is not None and self._drawn[0] == epoch:
            return self._drawn[1]
        seed = splitmix.base(self._seed, _SAMPLER, epoch, self._own)
        if self._generator is not None:
            # torch takes seeds of 63 bits.
            self._generator.manual_seed(seed % 2**63)
        set_epoch = getattr(self._sampler, "set_epoch", None)
        with kept_streams():
            seed_streams(seed)
            if callable(set_epoch):
                set_epoch(epoch)
            indices = _numbers(self._sampler, self._records)
        if self._drawn is not None and len(self._drawn[1]) != len(indices):
            before, drawn = self._drawn
            raise ConfigError(
                f"the sampler ({type(self._sampler).__name__}) drew "
                f"{many(len(indices), 'sample')} in epoch {epoch}, but {len(drawn):,} in epoch "
                f"{before}: all epochs must have the same number of samples. Let it draw a fixed "
                "number, num_samples= of torch's samplers, say."
            )
        return indices


@dataclass(frozen=True, kw_only=True)
class DrawnOrder(Order):
    """Sample order of a sampler, of `size` positions.

    Attributes:
        source: number of records of the source.
        draws: what the sampler has drawn.
    """

    shuffle: bool = False
    source: int
    draws: SamplerDraws = field(repr=False, compare=False)

    @property
    def records(self) -> int:
        """The number of records of the source."""
        return self.source

    def epoch_indices(self, epoch: int) -> Indices:
        """List the records of an epoch, which is drawn, in their order; shape (samples,)."""
        return self.draws.indices(epoch)[: self.samples]

    def transform_keys(self, indices: Indices, positions: Indices) -> Indices:
        """Return a number for each position: a sample at two of them has two transforms."""
        return self.source + positions

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint has of it, by name."""
        names = ("size", "batch_size", "seed", "epoch_size", "shuffle", "source")
        return {name: getattr(self, name) for name in names}


class WeightedSampler:
    """Sampler that draws as many samples as there are, with replacement, in proportion to weights.

    Unlike torch's, it draws from more than 2^24 samples.

    Args:
        weights: (samples,) of each sample; they need not sum to 1.
        records: number of samples of the data set.

    Raises:
        ConfigError: there is another number of weights, or one that isn't finite and at least 0.
    """

    def __init__(self, weights: Any, records: int) -> None:
        try:
            values = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"weights is {type(weights).__name__}: pass a number for each sample of the data "
                "set, as a tensor or a list."
            ) from error
        if values.shape != (records,):
            raise ConfigError(
                f"weights has shape {tuple(values.shape)}, but the data set has {records:,} "
                f"samples: pass one weight a sample, shape ({records},)."
            )
        bad = (~((values >= 0) & values.isfinite())).nonzero().flatten().tolist()
        if bad or not values.any():
            given = f"weights[{bad[0]}] is {values[bad[0]]:g}" if bad else "weights is 0 everywhere"
            raise ConfigError(f"{given}: pass finite numbers, at least 0, of which one is above 0.")
        self._values = values

    def __len__(self) -> int:
        """Return the number of samples that it draws."""
        return len(self._values)

    def __iter__(self) -> Iterator[int]:
        """Draw them."""
        cumulative = self._values.cumsum(0)
        points = torch.rand(len(self), dtype=torch.float64) * cumulative[-1]
        last = int(self._values.nonzero()[-1])
        drawn: list[int] = (
            # Rounding may put a point at the very end, behind the last sample that has a weight.
            torch.searchsorted(cumulative, points, right=True).clamp_(max=last).tolist()
        )
        return iter(drawn)


def _require_plain(sampler: Any) -> None:
    name = type(sampler).__name__
    if isinstance(sampler, BatchSampler):
        raise _batches(name)
    if getattr(sampler, "num_replicas", 1) != 1:
        raise ConfigError(
            f"sampler is {name}, which divides the samples among {sampler.num_replicas} ranks "
            "itself: paceline.loader divides them. Pass the sampler of the whole data set, or "
            "leave sampler= out to shuffle."
        )
    if not isinstance(sampler, Iterable) or isinstance(sampler, Iterator):
        raise ConfigError(
            f"sampler is {name}, which can't be iterated anew in each epoch: pass a torch Sampler, "
            "a list of sample indices, or another object whose __iter__ begins anew."
        )


def _numbers(sampler: Iterable[Any], records: int) -> Indices:
    """Return what a sampler draws; raise ConfigError if these aren't samples' numbers."""
    name = type(sampler).__name__
    limit = _LONGEST * records
    drawn = list(islice(sampler, limit + 1))
    if len(drawn) > limit:
        raise ConfigError(
            f"the sampler ({name}) draws more than {limit:,} samples of a data set of {records:,}: "
            "an endless sampler has no epochs. Let it end, with num_samples= of torch's samplers, "
            "say."
        )
    if not drawn:
        raise ConfigError(f"the sampler ({name}) draws no sample: let it draw at least one.")
    numbers = []
    for one in drawn:
        if isinstance(one, list | tuple | np.ndarray) or (isinstance(one, Tensor) and one.ndim):
            raise _batches(name)
        try:
            number = operator.index(one)
        except TypeError:
            number = -1
        if not 0 <= number < records:
            raise ConfigError(
                f"the sampler ({name}) draws {one!r}: it must draw sample indices, whole numbers "
                f"from 0 to {records - 1:,}."
            )
        numbers.append(number)
    return np.array(numbers, dtype=np.int64)


def _batches(name: str) -> ConfigError:
    return ConfigError(
        f"sampler is {name}, which draws batches: paceline.loader makes the batches, and divides "
        "them among the ranks. Pass a sampler of single samples, batch_size=, and drop_last=."
    )
