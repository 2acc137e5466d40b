"""Collectives among the ranks of one generation: the seam to `torch.distributed`.

`all_reduce` returns a ticket at once; `Ticket.wait` waits for the result. Every wait has a limit,
and an error names the operation, this rank and, where the transport knows it, the peer.

Whatever the ranks compute on, the functions here exchange tensors in this machine's memory: what
they carry, the host knows, or must know.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import CommError, ConfigError

TEXT_BYTES = 256  # bytes of what `gather_texts` gathers
_PLACE = "the "  # begins the name of a place in a loop, instead of a call's
_SHOWN = 80  # characters of names in an error
_BROADCAST_BYTES = 2**24  # of one broadcast, unless a tensor alone has more


class Ticket(Protocol):
    """Handle of an asynchronous collective."""

    def done(self) -> bool:
        """Return whether `wait` would return at once."""

    def wait(self, operation: str) -> None:
        """Return once the result is ready; on a GPU, once the stream's next kernels see it.

        Args:
            operation: the name of the operation, for errors.

        Raises:
            PeerLost: a peer's connection ended.
            CommTimeout: the limit was reached.
        """


class Communicator(Protocol):
    """Protocol of collective communication over a fixed set of ranks.

    Attributes:
        rank: this process's rank.
        world_size: the number of ranks.
    """

    rank: int
    world_size: int

    def all_reduce(self, tensor: Tensor) -> Ticket:
        """Start to replace `tensor`, of any shape, by its sum over the ranks.

        All ranks start their collectives in the same order.
        """

    def broadcast(self, tensor: Tensor) -> Ticket:
        """Start to replace `tensor` by rank 0's."""

    def reduce(self, tensor: Tensor) -> Ticket:
        """Start to replace rank 0's `tensor` by the sum over ranks; others' become undefined."""

    def gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Ticket:
        """Start to copy all ranks' `tensor`, of one shape, to rank 0.

        Args:
            tensor: this rank's.
            into: on rank 0 a target for each rank's, in rank order; elsewhere empty.
        """

    def all_gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Ticket:
        """Start to copy all ranks' `tensor`, of one shape, to all ranks.

        Args:
            tensor: this rank's.
            into: a target for each rank's, in rank order.
        """

    def end_startup(self) -> None:
        """Use the shorter timeout of later steps from now on."""

    def close(self) -> None:
        """Close after the last collective has completed; leave no thread."""

    def abort(self) -> None:
        """Abort all connections without waiting."""

    def interrupt(self) -> None:
        """End all waits with an error, now and later; may be called from another thread.

        Nothing is released: the thread that communicates calls `abort` or `close` afterwards.
        """


def total(communicator: Communicator, tensor: Tensor, operation: str) -> Tensor:
    """Return the sum of `tensor` over all ranks; collective."""
    if communicator.world_size == 1:
        return tensor.clone()
    result = tensor.detach().to("cpu", copy=True)
    communicator.all_reduce(result).wait(operation)
    return result.to(tensor.device)


def gather_texts(communicator: Communicator, text: str, operation: str) -> list[str]:
    """Return the first `TEXT_BYTES` of each rank's `text`, on all ranks; collective.

    A rank that is in another collective meanwhile lets this one time out. The transport itself
    would abort the process if the two were all-reduces of different sizes.
    """
    own = bytearray(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES))
    table = torch.empty(communicator.world_size, TEXT_BYTES, dtype=torch.uint8)
    rows = [*table] if communicator.rank == 0 else []
    communicator.gather(torch.frombuffer(own, dtype=torch.uint8), rows).wait(operation)
    communicator.broadcast(table).wait(operation)
    return [row.tobytes().decode(errors="replace").rstrip() for row in table.numpy()]


def require_same_call(
    communicator: Communicator,
    call: str,
    given: str,
    operation: str,
    *,
    remedy: str = "pass tensors of the same shape and dtype",
) -> None:
    """Require that all ranks make the same call, with arguments of the same form; collective.

    Args:
        communicator: connects the ranks.
        call: the call, for the errors.
        given: this rank's form of the arguments; "" where there are none.
        operation: as in `Ticket.wait`.
        remedy: what to do where the arguments differ.

    Raises:
        ConfigError: a rank makes another call, or with other arguments; names both.
    """
    for rank, other in enumerate(gather_given(communicator, call, given, operation)):
        if other != given:
            raise ConfigError(
                f"{call} got {given} on rank {communicator.rank} and {other} on rank {rank}: "
                f"{remedy}."
            )


def gather_given(communicator: Communicator, call: str, given: str, operation: str) -> list[str]:
    """Return what each rank has given to the same call, on all ranks; as `gather_texts`.

    Raises:
        ConfigError: a rank makes another call; names both.
        CommError: a peer was lost, or silent.
    """
    try:
        texts = gather_texts(communicator, f"{call}\n{given}", operation)
    except CommError as error:
        error.of_call = True
        raise
    for rank, text in enumerate(texts):
        other_call, _, _ = text.partition("\n")
        if other_call != call:
            if other_call.startswith(_PLACE) and not call.startswith(_PLACE):
                raise not_on_all(call, communicator.rank, rank, f"is at {other_call}")
            if call.startswith(_PLACE) and not other_call.startswith(_PLACE):
                raise not_on_all(other_call, rank, communicator.rank, f"is at {call}")
            raise ConfigError(
                f"{call} was called on rank {communicator.rank} and {other_call} on rank {rank}: "
                "all ranks must make the same calls in the same order."
            )
    return [text.partition("\n")[2] for text in texts]


def not_on_all(call: str, rank: int, other: int, instead: str) -> ConfigError:
    """Return the error of a call on one rank and not on another one.

    Args:
        rank: a rank that makes it.
        other: one that doesn't.
        instead: a clause on what that one does.
    """
    return ConfigError(
        f"rank {rank} waits in {call}, but rank {other} {instead}: all ranks must make the same "
        "calls in the same order. Make each call on all ranks, not under `if world.rank == 0:`, "
        "and iterate evaluations to their end."
    )


def shortened(names: Sequence[str]) -> str:
    """Return names as `require_same_call` takes them: of many the first ones and a checksum."""
    text = ", ".join(names)
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}… ({len(names)} names, checksum {zlib.crc32(text.encode()):08x})"


def broadcast_all(communicator: Communicator, tensors: Sequence[Tensor], operation: str) -> None:
    """Give all ranks rank 0's values of `tensors`; collective.

    Many travel in one broadcast, of which a copy is made: not of all tensors at once. Those of a
    GPU travel through this machine's memory, where ranks may share the GPU.
    """
    if communicator.world_size == 1:
        return
    for alike in _pieces(tensors):
        flat = torch.cat([tensor.detach().flatten() for tensor in alike]).cpu()
        # as bytes: some dtypes are unknown to some transports
        communicator.broadcast(flat.view(torch.uint8)).wait(operation)
        sizes = [tensor.numel() for tensor in alike]
        for tensor, values in zip(alike, torch.split(flat, sizes), strict=True):
            tensor.detach().copy_(values.view(tensor.shape))


def _pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one dtype that are broadcast together."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        piece: list[Tensor] = []
        nbytes = 0
        for tensor in alike:
            if piece and nbytes + tensor.nbytes > _BROADCAST_BYTES:
                yield piece
                piece = []
                nbytes = 0
            piece.append(tensor)
            nbytes += tensor.nbytes
        yield piece


def gather_counts(communicator: Communicator, count: int, operation: str) -> list[int]:
    """Return each rank's `count` on all ranks; collective, as `gather_bytes`."""
    return CountsTicket(communicator, count).wait(operation)


class CountsTicket:
    """Handle of each rank's count, which is on its way to all ranks; making it is collective.

    A rank that is in a bucket's all-reduce meanwhile lets it time out, as `gather_texts`.

    Args:
        communicator: the ranks; a rank alone exchanges nothing.
        count: this rank's.
    """

    def __init__(self, communicator: Communicator, count: int) -> None:
        self._counts = torch.full((communicator.world_size, 1), count)
        self._ticket = None
        if communicator.world_size > 1:
            self._ticket = communicator.all_gather(torch.tensor([count]), [*self._counts])

    def wait(self, operation: str) -> list[int]:
        """Return the counts, in rank order.

        Raises:
            CommError: as `Ticket.wait`.
        """
        if self._ticket is not None:
            self._ticket.wait(operation)
        counts: list[int] = self._counts.flatten().tolist()
        return counts


def gather_bytes(communicator: Communicator, data: bytes, operation: str) -> list[bytes]:
    """Return each rank's `data`, of any length, on all ranks; collective.

    Args:
        communicator: the ranks.
        data: this rank's.
        operation: the name of the operation, for errors.
    """
    sizes = gather_counts(communicator, len(data), operation)
    parts = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    if data:
        parts[communicator.rank] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    flat = torch.cat(parts)  # the others' parts are zeros: the sum has all parts
    if flat.numel():
        communicator.all_reduce(flat).wait(operation)
    return [part.numpy().tobytes() for part in flat.split(sizes)]


def gather_states(
    communicator: Communicator, state: Any, operation: str, *, on_all: bool = True
) -> list[Any]:
    """Return each rank's tree of tensors and plain values on all ranks; collective.

    The tensors are in this machine's memory.

    Args:
        communicator: the ranks.
        state: this rank's.
        operation: the name of the operation, for errors.
        on_all: otherwise rank 0 alone gets them, and the others nothing.

    Raises:
        CommError: as `Ticket.wait`.
    """
    data = io.BytesIO()
    torch.save(state, data)
    if on_all:
        gathered = gather_bytes(communicator, data.getvalue(), operation)
    else:
        own = torch.frombuffer(data.getbuffer(), dtype=torch.uint8)
        gathered = [each.numpy().tobytes() for each in gather_all(communicator, own, operation)]
    states = (io.BytesIO(each) for each in gathered)
    return [torch.load(each, map_location="cpu", weights_only=True) for each in states]


def broadcast_state(communicator: Communicator, state: Any, operation: str) -> Any:
    """Return rank 0's tree of tensors and plain values on all ranks, in this machine's memory.

    Args:
        communicator: the ranks.
        state: rank 0's; the others' is ignored.
        operation: the name of the operation, for errors.

    Raises:
        CommError: as `Ticket.wait`.
    """
    data = io.BytesIO()
    if communicator.rank == 0:
        torch.save(state, data)
    size = torch.tensor([len(data.getbuffer())], dtype=torch.int64)
    communicator.broadcast(size).wait(operation)
    room = bytearray(data.getvalue() or int(size))  # on other ranks zeros, which are replaced
    flat = torch.frombuffer(room, dtype=torch.uint8)
    communicator.broadcast(flat).wait(operation)
    received = io.BytesIO(flat.numpy().tobytes())
    return torch.load(received, map_location="cpu", weights_only=True)


def gather_all(communicator: Communicator, tensor: Tensor, operation: str) -> list[Tensor]:
    """Return all ranks' flat tensors, of any lengths, on rank 0; nothing elsewhere. Collective."""
    lengths = gather_counts(communicator, tensor.numel(), operation)
    padded = tensor.new_zeros(max(lengths))
    padded[: tensor.numel()] = tensor
    into = [torch.empty_like(padded) for _ in lengths] if communicator.rank == 0 else []
    communicator.gather(padded, into).wait(operation)
    return [padded[:length] for padded, length in zip(into, lengths, strict=False)]
