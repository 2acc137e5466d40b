"""Buffers that a model computes from its samples: rank 0's are broadcast after each step's block.

    with world.step():
        …                   a forward moves them: ranges of observers, codebooks, normalisers
    send                    rank 0's values start to travel …
    install                 … and are installed before the next forward, step or state dict

So all ranks begin each step with the same values, as with DDP. Running statistics of BatchNorm are
averaged instead. Buffers that no state dict contains stay each rank's own.

Nothing waits within a step: on CPUs `install` waits for what has arrived long since; on GPUs the
copies are queued behind the broadcast at once. What a script writes into a buffer between two steps
stays, and is rank 0's after the step that follows.

Where a model's buffers are so large that a step would notice (quantised weights, say), the large
ones are broadcast only if the first step has changed them on any rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from paceline.comm.communicator import (
    Communicator,
    Ticket,
    gather_bytes,
    require_same_call,
    shortened,
)
from paceline.generation.run import Run
from paceline.replica.checksums import checksum
from paceline.replica.earlier_buffers import computed_buffers

_ALIGNMENT = 16  # bytes: of the widest dtype, complex128
_SMALL = 2**20  # bytes of a buffer that is broadcast whatever the others' sizes are
_ALL = 32 * 2**20  # bytes of all buffers, up to which none is left out

_Layout = dict[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sent:
    """Broadcast under way.

    Attributes:
        own: this rank's values when it began, as bytes.
        received: rank 0's, once the ticket is done.
        layout: of both.
        ticket: of the broadcast.
    """

    own: Tensor
    received: Tensor
    layout: _Layout
    ticket: Ticket


class BufferBroadcast:
    """Broadcast of rank 0's buffers to all ranks, in each step.

    Args:
        model: the model, with the same buffers on all ranks.
        run: the run, whose ranks broadcast.
    """

    def __init__(self, model: nn.Module, run: Run) -> None:
        self._model = model
        self._run = run
        self._owners: Mapping[str, tuple[nn.Module, str]] = {}
        self._layout: _Layout = {}  # what all ranks agree on
        self._left_out: frozenset[str] = frozenset()
        self._before: Mapping[str, Tensor | int] | None = None  # checksums of large ones
        self._sent: _Sent | None = None

    def _host_communicator(self) -> Communicator:
        return self._run.context.group("data", "steps")

    def _device_communicator(self) -> Communicator:
        return self._run.context.group("data", "buffers")

    def begin_generation(self) -> None:
        """Take the present buffers, whose values and shapes are the same on all ranks."""
        self._sent = None
        self.find()
        self._layout = self._present()
        self._before = None
        self._left_out = frozenset()
        if self._host_communicator().world_size > 1:
            sizes = {name: self._tensor(name).nbytes for name in self._layout}
            if sum(sizes.values()) > _ALL:
                large = [name for name, size in sizes.items() if size > _SMALL]
                self._before = {name: checksum(self._tensor(name)) for name in large}
                self._left_out = frozenset(large)

    def find(self) -> None:
        """Find the model's present buffers, which may be others than before."""
        self._owners = {name: (module, key) for name, module, key in computed_buffers(self._model)}

    def send(self) -> None:
        """Begin to broadcast the present values; collective, after each step's block.

        Raises:
            ConfigError: the ranks' buffers have different shapes.
        """
        self.install()
        if not self._owners or self._host_communicator().world_size == 1:
            return
        if self._before is not None:
            self._choose_large(self._before)
            self._before = None
        present = self._present()
        if present != self._layout:
            self._agree(present)
        if not (sent := {n: form for n, form in present.items() if n not in self._left_out}):
            return
        own = _pack([self._tensor(name) for name in sent], sent)
        communicator = self._device_communicator()
        received = own if communicator.rank == 0 else own.clone()
        ticket = communicator.broadcast(received)
        self._sent = _Sent(own=own, received=received, layout=sent, ticket=ticket)
        if own.is_cuda:  # the stream waits, not the host, unless ranks share the GPU
            self.install()

    def install(self) -> None:
        """Install rank 0's values, if a broadcast is under way.

        Raises:
            CommError: a peer was lost, or didn't answer in time.
        """
        # Apart from what needs torch.no_grad, which costs more than this question in each step.
        if self._sent is not None:
            sent = self._sent
            self._sent = None
            self._install(sent)

    @torch.no_grad()
    def _install(self, sent: _Sent) -> None:
        sent.ticket.wait("the broadcast of rank 0's buffers")
        if self._device_communicator().rank == 0:
            return
        present = self._present()
        names = [name for name, form in sent.layout.items() if present.get(name) == form]
        tensors = {name: self._tensor(name) for name in names}
        if not sent.own.is_cuda:  # where it is installed before a script can write
            own = _views(sent.own, sent.layout)
            for name, tensor in list(tensors.items()):
                if not _same_bytes(tensor, own[name]):
                    del tensors[name]
        received = _views(sent.received, sent.layout)
        if tensors:
            torch._foreach_copy_([*tensors.values()], [received[name] for name in tensors])

    def discard(self) -> None:
        """Let go of what is under way."""
        self._sent = None

    def _tensor(self, name: str) -> Tensor:
        module, key = self._owners[name]
        tensor = module._buffers[key]
        assert tensor is not None
        return tensor.detach()

    def _present(self) -> _Layout:
        """Return shape and dtype of each present buffer that is where the model's first one is."""
        found: _Layout = {}
        device: torch.device | None = None
        for name, (module, key) in self._owners.items():
            tensor = module._buffers.get(key)
            if tensor is None:
                continue
            device = tensor.device if device is None else device
            if tensor.device == device:
                found[name] = (tensor.shape, tensor.dtype)
        return found

    def _agree(self, present: _Layout) -> None:
        """Require that all ranks' buffers have the same new shapes; collective."""
        changed = {name: form for name, form in present.items() if self._layout.get(name) != form}
        texts = [f"{n}: {tuple(shape)} {dtype}" for n, (shape, dtype) in changed.items()]
        removed = [f"{name} removed" for name in self._layout if name not in present]
        require_same_call(
            self._host_communicator(),
            "world.step() with buffers of other shapes than before",
            shortened([*texts, *removed]),
            "the comparison of the buffers' shapes",
            remedy='let buffers have the same shapes on all ranks, or pass buffers="local" to '
            "paceline.parallelize()",
        )
        self._layout = present

    def _choose_large(self, before: Mapping[str, Tensor | int]) -> None:
        """Broadcast from now on the large buffers that a first step has changed; collective."""
        changed = [
            name
            for name, total in before.items()
            if name in self._present() and int(checksum(self._tensor(name))) != int(total)
        ]
        what = "the names of buffers that the first step has changed"
        of_ranks = gather_bytes(self._host_communicator(), json.dumps(changed).encode(), what)
        self._left_out -= {name for names in of_ranks for name in json.loads(names)}


def _pack(tensors: Sequence[Tensor], layout: _Layout) -> Tensor:
    """Return the values of a layout's tensors in one tensor of bytes, where `_views` finds them."""
    size = sum(map(_padded, layout.values()))
    flat = torch.zeros(size, dtype=torch.uint8, device=tensors[0].device)
    torch._foreach_copy_([*_views(flat, layout).values()], [*tensors])
    return flat


def _views(flat: Tensor, layout: _Layout) -> dict[str, Tensor]:
    """View the tensors of a layout in the bytes that `_pack` made."""
    ends = accumulate(map(_padded, layout.values()), initial=0)
    return {
        name: flat[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for (name, (shape, dtype)), start in zip(layout.items(), ends, strict=False)
    }


def _padded(form: tuple[torch.Size, torch.dtype]) -> int:
    """Return the bytes that a tensor takes in a packed one."""
    shape, dtype = form
    return -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one form are equal bit for bit, NaN too."""
    if not one.numel():
        return True
    bits = one.contiguous().view(-1).view(torch.uint8)
    return torch.equal(bits, other.reshape(-1).view(torch.uint8))
