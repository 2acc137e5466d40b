"""Checksums of a replica's state: of each entry that ought to be equal on all ranks.

A small tensor's checksum is the CRC-32 of its values. A large one's is a sum of its bits, read as
integers and weighted by their places in rows of 1,024, modulo 2^64: it is as fast as memory. The
weights are odd, so that one flipped bit, the highest too, always changes the sum; they differ, so
that an exchange of two values does. A layout of memory (channels last) changes neither checksum. A
plain value's is the CRC-32 of its text. All checksums together have a code of 20 bits, which
travels in a step's summary.

What differs between ranks by design isn't compared: shards of an optimizer's state, error-feedback
residuals, tracked objects, buffers that no state dict contains, and those of buffers="local".
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.errors import many
from paceline.reduce.rank_state import OPTIMIZER as SHARDED_OPTIMIZER
from paceline.replica.state_parts import (
    BUFFERS,
    ENTRIES,
    GROUPS,
    LOCAL_BUFFERS,
    OPTIMIZER,
    PARAMETERS,
    RANK,
)

Checksums = Mapping[str, int]
"""Checksums by entry, in the state dict's order; an entry is named as errors show it."""

Parts = Mapping[str, Mapping[Any, Any]]
_Sum = tuple[str, str, Tensor | int]  # part, name and checksum of an entry

_ROW = 1024  # values
_LARGE = 2**20  # bytes
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # by a value's bytes
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


class ChecksumParts:
    """Receiver of a state's parts that retains their checksums only.

    Of several models and optimizers, each has parts of its own: "parameters 2", "buffers 2", …

    Args:
        parameters_only: the checksums are those of the parameters.
    """

    def __init__(self, *, parameters_only: bool = False) -> None:
        self._only = {PARAMETERS} if parameters_only else None
        self._entries: dict[str, Mapping[Any, Any]] = {}  # by the suffix of a model's parts
        self._sharded: set[str] = set()  # likewise, those whose optimizer state is in shards
        self._sums: dict[str, list[_Sum]] = {}

    def open(self, name: SnapshotName) -> None:
        """Begin."""

    def add(self, name: SnapshotName, parts: Parts) -> None:
        """Sum the values of parts, of which the first ones name the state dict's entries."""
        for suffix, values in _by_suffix(parts).items():
            self._entries[suffix] = values.get(ENTRIES, self._entries.get(suffix, {}))
            if SHARDED_OPTIMIZER in values.get(RANK, {}):
                self._sharded.add(suffix)
            if self._only is not None:
                values = {part: value for part, value in values.items() if part in self._only}
            named = {**values, ENTRIES: self._entries[suffix]}
            self._sums.setdefault(suffix, []).extend(_sums(named))

    def hold(self, name: SnapshotName) -> None:
        """End: all parts are added."""

    def result(self) -> Checksums:
        """Return the checksums of all parts."""
        found: dict[str, int] = {}
        for suffix, sums in self._sums.items():
            numbers = _numbers(sums, self._entries[suffix], sharded=suffix in self._sharded)
            found |= {name + _model_name(suffix): number for name, number in numbers.items()}
        return found


def checksums_of(state: Parts) -> Checksums:
    """Return the checksums of a snapshot's parts."""
    parts = ChecksumParts()
    parts.add(SnapshotName("", 0), state)
    return parts.result()


def code_of(checksums: Checksums) -> int:
    """Return a code of all checksums, 1 to 2^20 - 1; equal ones have equal codes."""
    text = "\n".join(f"{name} {checksum}" for name, checksum in sorted(checksums.items()))
    return zlib.crc32(text.encode()) % (2**20 - 1) + 1


def difference(of_ranks: Sequence[Checksums]) -> str:
    """Describe the first entry that differs between ranks, and which ranks; "" if none does.

    Where most ranks agree, the others are named.
    """
    names = dict.fromkeys(name for checksums in of_ranks for name in checksums)
    differing = [name for name in names if len({one.get(name) for one in of_ranks}) > 1]
    if not differing:
        return ""
    values = [checksums.get(differing[0]) for checksums in of_ranks]
    ((usual, count), *_) = Counter(values).most_common()
    others = [rank for rank, value in enumerate(values) if value != usual]
    if 2 * count > len(values):
        rest = "the others" if count > 1 else "the other rank"
        verb = "differs" if len(others) == 1 else "differ"
        where = f"{name_ranks(others)} {verb} from {rest}"
    else:
        where = f"{name_ranks(range(len(values)))} differ"
    more = f", and in {many(len(differing) - 1, 'more value')}" if len(differing) > 1 else ""
    return f"{where} in {differing[0]}{more}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks: "rank 1", "ranks 0 and 2", "ranks 0, 1 and 3"."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _model_name(suffix: str) -> str:
    return f" (model and optimizer{suffix})" if suffix else ""


def _by_suffix(parts: Parts) -> dict[str, dict[str, Mapping[Any, Any]]]:
    """Return the parts of each model and its optimizer, by the suffix of their names."""
    found: dict[str, dict[str, Mapping[Any, Any]]] = {}
    for part, values in parts.items():
        name, space, number = part.rpartition(" ")
        several = space and number.isdigit()
        found.setdefault(f" {number}" if several else "", {})[name if several else part] = values
    return found


def _sums(state: Parts) -> Iterator[_Sum]:
    """Yield part, name and checksum of each entry; a tensor's is on the tensor's device."""
    saved = set(state[ENTRIES].values())
    for name, tensor in state.get(PARAMETERS, {}).items():
        yield PARAMETERS, name, checksum(tensor)
    local = state.get(LOCAL_BUFFERS, {})
    for name, tensor in state.get(BUFFERS, {}).items():
        if name in saved and name not in local and isinstance(tensor, Tensor):
            yield BUFFERS, name, checksum(tensor)
    for name, entries in state.get(OPTIMIZER, {}).items():
        for key, value in entries.items() if isinstance(entries, Mapping) else ():
            for label, total in _leaves(f"the optimizer's {key}", value):
                yield OPTIMIZER, f"{label} of {name}", total
    for number, options in state.get(GROUPS, {}).items():
        for key, value in options.items():
            for label, total in _leaves(str(key), value):
                yield GROUPS, f"{label} of the optimizer's group {number}", total


def checksum(value: Tensor) -> Tensor | int:
    """Return the checksum of a tensor's values: a number, or a tensor on the same device."""
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    words = dense.resolve_neg().contiguous().view(_INTEGERS[dense.element_size()]).flatten()
    if words.dtype is torch.int16 and not (len(words) % 2 or words.storage_offset() % 2):
        words = words.view(torch.int32)  # a sum of int16 would copy all of it as int64
    if words.nbytes < _LARGE and words.device.type == "cpu":
        return zlib.crc32(words.numpy().data)
    whole = len(words) // _ROW * _ROW
    kind = words.dtype
    rows = words[:whole].view(-1, _ROW)
    kind = kind if kind.itemsize >= 4 else torch.int64  # a sum in another type is slow
    columns = _weighted(rows.sum(0, dtype=kind), 0) + _weighted(words[whole:], 1)
    return columns + (2 * _ROW + 1) * _weighted(rows.sum(1, dtype=kind), 1)


def tree_checksum(value: Any) -> int:
    """Return the checksum of a tree's tensors and plain values."""
    leaves = [f"{name} {int(total)}" for name, total in _leaves("", value)]
    return zlib.crc32("\n".join(leaves).encode())


def _weighted(sums: Tensor, first: int) -> Tensor:
    """Return the sum of numbers times `first`, `first` + 2, `first` + 4, …, modulo 2^64."""
    weights = torch.arange(first, first + 2 * len(sums), 2, device=sums.device)
    return (sums.long() * weights).sum()


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor | int]]:
    """Yield names and checksums of a tree's tensors and plain values, and of no other objects."""
    if isinstance(value, Tensor):
        yield name, checksum(value)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(f"{name}[{key!r}]", one)
    elif isinstance(value, list | tuple) and not all(isinstance(one, _PLAIN) for one in value):
        for index, one in enumerate(value):
            yield from _leaves(f"{name}[{index}]", one)
    elif isinstance(value, (*_PLAIN, list, tuple)):
        yield name, zlib.crc32(repr(value).encode())


def _numbers(sums: Iterable[_Sum], entries: Mapping[Any, Any], *, sharded: bool) -> dict[str, int]:
    """Return the checksums as numbers, in the order of the state dict's entries; others follow."""
    kept = [(name, total) for part, name, total in sums if not (sharded and part == OPTIMIZER)]
    order = {name: number for number, name in enumerate(dict.fromkeys(entries.values()))}
    kept.sort(key=lambda one: (order.get(one[0], len(order)), one[0]))
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, total in kept:
        if isinstance(total, Tensor):
            by_device.setdefault(total.device, []).append(total.to(torch.int64))
    numbers = {device: iter(torch.stack(some).tolist()) for device, some in by_device.items()}
    return {n: next(numbers[t.device]) if isinstance(t, Tensor) else t for n, t in kept}
