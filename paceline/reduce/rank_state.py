"""The `RankState` protocol: state that is divided among ranks, and gathered in a checkpoint.

gather: all ranks' present parts ──┐
                                   ├─▶ the whole state, by parameter ── restore ──▶ this rank's
local, of all ranks ── combine ────┘
  └─ restore_local, where this rank has the same ranges again
"""

from __future__ import annotations

import io
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator, broadcast_state, gather_all, total
from paceline.errors import RankStateError
from paceline.reduce.buckets import like

OPTIMIZER = "optimizer"  # key of the optimizer's whole state dict, where ranks hold shards of it
MISSED = "missed"  # key of the error-feedback residuals
BUCKET_MB = "bucket_mb"  # key of the bucket size of the exchange that left them


Ranges = Mapping[str, tuple[int, int, Any]]
"""What a rank has of each parameter: (start, stop, values), a range of its values, and these."""

T = TypeVar("T", bound=Hashable)


def same_ranges(one: Ranges, other: Ranges) -> bool:
    """Return whether both have the same ranges of the same parameters."""
    ranges = [{name: entry[:2] for name, entry in own.items()} for own in (one, other)]
    return ranges[0] == ranges[1]


def cut_range(
    entry: tuple[int, int, Any], start: int, stop: int
) -> tuple[int, int, dict[str, Any]] | None:
    """Copy out of a parameter's range the values from `start` to `stop`; None: it has none.

    What isn't divided is copied, too: optimizers count their steps in place.
    """
    first, last, entries = entry
    start = max(start, first)
    stop = min(stop, last)
    if start >= stop:
        return None
    inside = slice(start - first, stop - first)
    cut = {k: v[inside] if divided(v) else v for k, v in entries.items()}
    return start, stop, {k: v.clone() if isinstance(v, Tensor) else v for k, v in cut.items()}


def append_ranges(ranges: dict[str, tuple[int, int, Any]], more: Ranges) -> None:
    """Append ranges to those of the same parameters, which end where they start."""
    for name, (start, stop, entries) in more.items():
        if name not in ranges:
            ranges[name] = start, stop, entries
            continue
        first, last, own = ranges[name]
        assert last == start
        ranges[name] = (
            first,
            stop,
            {k: torch.cat([v, entries[k]]) if divided(v) else v for k, v in own.items()},
        )


def join_ranges(name: str, template: Tensor, parts: Sequence[Ranges]) -> dict[str, Any]:
    """Join the ranks' ranges of one parameter.

        rank 0    exp_avg [ 0 … 4 ]            step 7
        rank 2    exp_avg         [ 5 … 8 ]    step 7
        joined    exp_avg [ 0 …         8 ]    step 7

    Ranges may overlap where their values are equal, so a part may be given twice.

    Args:
        name: the parameter's name.
        template: tensor of the parameter's shape and strides.
        parts: for each rank, by parameter: (start, stop, entries). An entry with one dimension is a
            range of values, (stop - start,); any other one is equal in all parts.

    Returns:
        the entries; those that were ranges have the template's shape and strides, in new memory.

    Raises:
        RankStateError: no part has some values, or parts differ.
    """
    entries: dict[str, Any] = {}
    end = 0
    numel = template.numel()
    ranges = sorted((part[name] for part in parts if name in part), key=itemgetter(0, 1))
    for start, stop, own in ranges:
        if start > end:
            raise RankStateError("no part has them", parameter=name, start=end, stop=start)
        if not end:
            entries = {k: v.new_empty(numel) if divided(v) else v for k, v in own.items()}
        common = min(end, stop)
        if own.keys() != entries.keys() or not all(
            torch.equal(entries[key][start:common], value[: common - start])
            if divided(value)
            else entries[key] == value
            for key, value in own.items()
        ):
            raise RankStateError("the parts differ", parameter=name, start=start, stop=stop)
        for key in filter(lambda key: divided(own[key]), own):
            entries[key][start:stop] = own[key]
        end = max(end, stop)
    if end < numel:
        raise RankStateError("no part has them", parameter=name, start=end, stop=numel)
    return {k: like(template, v) if divided(v) else v for k, v in entries.items()}


def agreed(values: Iterable[T]) -> T:
    """Return what all parts say of their snapshot and their world.

    Raises:
        RankStateError: they differ, or there is no part.
    """
    found = set(values)
    if len(found) != 1:
        raise RankStateError(
            "they are of different snapshots or worlds" if found else "no rank's part is there"
        )
    return found.pop()


def gather_parts(communicator: Communicator, part: Any, operation: str) -> list[Any]:
    """Return all ranks' parts of a state on rank 0; nothing elsewhere. Collective.

    Args:
        communicator: the ranks.
        part: this rank's; a tree of tensors and plain values.
        operation: the name of the operation, for errors.
    """
    data = io.BytesIO()
    torch.save(part, data)
    packed = torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)
    files = gather_all(communicator, packed, operation)
    return [
        torch.load(io.BytesIO(file.numpy().tobytes()), map_location="cpu", weights_only=True)
        for file in files
    ]


def restore_parts(
    own: RankState | None,
    parts: Sequence[Mapping[str, Any]],
    communicator: Communicator,
) -> bool:
    """Restore the parts of one snapshot, in the same world or another; collective.

    Args:
        own: the state of this rank; None on all ranks: none is divided.
        parts: the parts that this rank has: its own first, then those of members that are gone.
        communicator: the ranks.

    Returns:
        False where some of the parts had to be dropped.

    Raises:
        RankStateError: a part is missing.
    """
    if own is None:
        return not any(parts)
    what = "the division of the ranks' state"
    same = torch.tensor(float(len(parts) == 1 and own.restore_local(parts[0])))
    if total(communicator, same, what).item() == communicator.world_size:
        return True
    of_all = gather_parts(communicator, list(parts), what)
    full = [part for some in of_all for part in some if part]  # a new member has none
    merged = own.combine(full) if of_all else None
    return own.restore(broadcast_state(communicator, merged, what))


class Masters(Protocol):
    """Protocol of masters, which ranks have in their own state (`master_weights.py`)."""

    @property
    def parameters(self) -> Collection[Tensor]:
        """The narrow parameters, which follow from the masters by rounding."""

    def renew(self, parameter: Tensor) -> None:
        """Take this rank's part of what a script has written to a parameter; it is up to date."""

    def round(self, communicator: Communicator) -> None:
        """Write the rounded masters of all ranks to the parameters; collective."""


class RankState(Protocol):
    """Protocol of state that is divided among ranks; a checkpoint gathers and restores it."""

    def gather(self, communicator: Communicator) -> Mapping[str, Any] | None:
        """Return all ranks' state on rank 0, None elsewhere; collective, when all have settled."""

    @property
    def scaled(self) -> bool:
        """Whether it follows the scale of the loss."""

    @property
    def divides_optimizer(self) -> bool:
        """Whether it has parts of the optimizer's state."""

    @property
    def masters(self) -> Masters | None:
        """The masters that it has; None: no parameter is narrow."""

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Take this rank's share of what `gather` returned, in this world or another.

        Returns:
            False where some of it had to be dropped.
        """

    def local(self, *, in_step: bool = True) -> Mapping[str, Any]:
        """Return this rank's own part, by parameter, of the state before the next update.

        Args:
            in_step: a step runs: its buckets are sent, and `Synchronizer.end` wasn't called.
                Otherwise all is settled.

        Returns:
            the part. The tensors are views of the state itself, to be copied before the next step
            begins.
        """

    def restore_local(self, state: Mapping[str, Any]) -> bool:
        """Take a copy of what `local` returned, before a step begins; the copy stays as it is.

        Returns:
            False where this rank's part is another now (other buckets, ranks or machines): then the
            parts of all ranks must be divided anew, by `combine` and `restore`.
        """

    def combine(self, parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Combine all ranks' parts of one snapshot into what `gather` would have returned; local.

        The parts' world may have been another one. Trained parameters are as they were in it.

        Args:
            parts: copies of what `local` returned on all ranks of that world, in any order. A part
                may be there twice, and a rank that owned nothing may be left out. The result may
                share their memory.

        Returns:
            the whole state for `restore` in this world, before a step begins.

        Raises:
            RankStateError: the parts aren't all of one snapshot and one world, or a part is
                missing. Nothing has been changed: the run can resume from a durable checkpoint.
        """


def divided(value: Any) -> bool:
    """Return whether an entry of a parameter's state is a range of values."""
    return isinstance(value, Tensor) and value.dim() == 1
