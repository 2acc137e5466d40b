"""Link of a stage: activations and their gradients travel to the next stages by puts.

    stage s                                  stage s + 1
    put(buffer 0, activation 1) ──────────▶  take 1: copy it out of the buffer
    put(buffer 1, activation 2) ──────────▶
                               ◀───────────  notify: 1 was taken
    put(buffer 0, activation 3) ──────────▶  take 2

and so gradients the other way. Each direction has two receive buffers in the receiver's window: the
sender writes one while the receiver reads the other. A buffer begins with a header, which describes
its tensors: their number (-1: one tensor outside of a tuple), and of each the dtype, the number of
dimensions, and these. Notifications count what travels in a direction, over all batches.

The loss and the gradients of tied weights have receive buffers without an acknowledgement: a stage
reads them before it begins the next batch, without which no other stage can end that batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.comm.window import Window, timed_out
from paceline.errors import CommTimeout, ConfigError, PeerLost
from paceline.generation.context import GenerationContext, WindowSpec
from paceline.parallel.blocks import Value, tensors_in
from paceline.parallel.meta_twin import MOST_TENSORS, TensorSpec
from paceline.timeline.timeline import WAIT_FOR_STAGES

_BUFFERS = 2
_ALIGNED = 64  # bytes
_HEADER = 8 * (1 + 16 * MOST_TENSORS)  # bytes of a buffer; dimensions take less of it
_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.complex128, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
# Notifications, by direction: of what has arrived, and of what the receiver has taken.
_ARRIVED = {1: 0, -1: 1}
_TAKEN = {1: 2, -1: 3}
_LOSS = 4
_TIED = 5
_NAMES = {1: "the activations", -1: "the gradients"}


class StageLink:
    """Link of one stage with the others of its replica, in one generation.

    Args:
        context: the generation.
        buffer_bytes: the size of the largest boundary.
        tied_bytes: the sizes of weights that several stages have.

    Attributes:
        buffer_bytes: as given.
        waited: nanoseconds that the last `receive` has waited.
    """

    def __init__(
        self, context: GenerationContext, buffer_bytes: int, tied_bytes: Sequence[int]
    ) -> None:
        group = context.along("stage")
        self.buffer_bytes = buffer_bytes
        self.waited = 0
        self._context = context
        self._ranks = group.ranks
        self._stage = group.rank
        self._buffer = _aligned(_HEADER + buffer_bytes)
        self._loss_at = 2 * _BUFFERS * self._buffer
        ends = accumulate((group.size * _aligned(size) for size in tied_bytes), initial=_ALIGNED)
        self._tied_at = [self._loss_at + end for end in ends]
        self._window: Window = context.window(
            "stages", WindowSpec(axis="stage"), self._tied_at[-1], _TIED + len(tied_bytes)
        )
        self._sent = {1: 0, -1: 0}
        self._taken = {1: 0, -1: 0}

    def send(self, to: int, value: Value, microbatch: int) -> None:
        """Put a value to the next stage (`to` is 1) or to the one before (-1).

        It waits until that stage has taken the last but one.

        Raises:
            ConfigError: it is larger than the meta device has shown, or no plain tensor.
        """
        header, dense = self._packed(value)
        self._sent[to] += 1
        number = self._sent[to]
        operation = f"sending {_NAMES[to]} of microbatch {microbatch}"
        self._wait(self._stage + to, _TAKEN[to], number - _BUFFERS, operation)
        with self._named(operation):
            offset = self._buffer_at(to, number)
            self._window.put(self._stage + to, offset, [header, *dense], _ARRIVED[to], number)

    def _packed(self, value: Value) -> tuple[Tensor, list[Tensor]]:
        """Return the header of a value, and its tensors as they travel."""
        tensors = tensors_in(value)
        form = [-1 if isinstance(value, Tensor) else len(tensors)]
        for tensor in tensors:
            if tensor.dtype not in _DTYPES or is_traceable_wrapper_subclass(tensor):
                raise ConfigError(
                    f"a stage returns a {type(tensor).__name__} of {tensor.dtype}, which doesn't "
                    "travel between stages: return plain tensors, of a DTensor `to_local()`, and "
                    f"of {', '.join(map(str, _DTYPES))}."
                )
            form += [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
        header = torch.tensor(form)
        dense = [t.detach().resolve_conj().resolve_neg().cpu().contiguous() for t in tensors]
        if header.nbytes + sum(tensor.nbytes for tensor in dense) > self._buffer:
            shapes = ", ".join(f"{t.dtype} of shape {tuple(t.shape)}" for t in tensors)
            raise ConfigError(
                f"a stage returns {shapes}, for which its receiver has no memory: on the meta "
                f"device the stages returned {self.buffer_bytes:,} bytes at most. Use operations "
                "whose results' shapes follow from shapes alone."
            )
        return header, dense

    def receive(self, to: int, microbatch: int) -> Value:
        """Return the next value that travels in a direction, once it is here."""
        self._taken[to] += 1
        number = self._taken[to]
        begin = self._context.timeline.clock()
        operation = f"{_NAMES[to]} of microbatch {microbatch}"
        self._wait(self._stage - to, _ARRIVED[to], number, operation)
        self.waited = self._context.timeline.clock() - begin
        offset = self._buffer_at(to, number)
        form = iter(self._window.memory[offset : offset + _HEADER].view(torch.int64).tolist())
        count = next(form)
        specs = []
        for _ in range(abs(count)):
            dtype = _DTYPES[next(form)]
            specs.append(TensorSpec(tuple(islice(form, next(form))), dtype))
        size = 8 * (1 + sum(2 + len(spec.shape) for spec in specs))
        copies = self._copies(offset + size, specs)
        with self._named(operation):
            self._window.put(self._stage - to, 0, None, _TAKEN[to], number)
        tensors = [copy.to(self._context.device) for copy in copies]
        return tensors[0] if count < 0 else tuple(tensors)

    def share_loss(self, loss: Tensor | None, batch: int) -> Tensor:
        """Return the last stage's loss on all stages, as float64; `batch` counts from 1."""
        last = len(self._ranks) - 1
        if loss is None:
            self._wait(last, _LOSS, batch, "the loss")
            return self._copies(self._loss_at, [TensorSpec((), torch.float64)])[0]
        value = loss.detach().cpu().double()
        with self._named("sending the loss"):
            for stage in range(last):
                self._window.put(stage, self._loss_at, value, _LOSS, batch)
        return value

    def sum_tied(self, index: int, own: Tensor, stages: Sequence[int], batch: int) -> Tensor:
        """Return the sum of a tied weight's gradients over its stages, in their order."""
        at = [
            self._tied_at[index] + stage * _aligned(own.nbytes) for stage in range(len(self._ranks))
        ]
        dense = own.cpu().contiguous()
        with self._named("sending the gradient of a tied weight"):
            for stage in stages:
                if stage != self._stage:
                    self._window.put(stage, at[self._stage], dense, _TIED + index, batch)
        spec = TensorSpec(tuple(own.shape), own.dtype)
        total = torch.zeros_like(dense)
        for stage in stages:
            if stage != self._stage:
                self._wait(stage, _TIED + index, batch, "the gradient of a tied weight")
            total += dense if stage == self._stage else self._copies(at[stage], [spec])[0]
        return total.to(own.device)

    def settle(self) -> None:
        """Wait until the other stages have received what was sent: this process may end next."""
        operation = "the end of the batch"
        for to, number in self._sent.items():
            if number:
                self._wait(self._stage + to, _TAKEN[to], number, operation)
        with self._named(operation), self._context.timeline.span(WAIT_FOR_STAGES):
            for stage in range(len(self._ranks)):
                if stage != self._stage:
                    self._window.flush(stage, limit=self._limit, operation=operation)

    def close(self) -> None:
        """Close the window."""
        self._window.close()

    def _buffer_at(self, to: int, number: int) -> int:
        return ((0 if to > 0 else _BUFFERS) + number % _BUFFERS) * self._buffer

    def _copies(self, offset: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        copies = []
        for spec in specs:
            data = self._window.memory[offset : offset + spec.bytes].clone()
            copies.append(data.view(spec.dtype).view(spec.shape))
            offset += spec.bytes
        return copies

    def _wait(self, stage: int, notification: int, value: int, operation: str) -> None:
        limit = self._limit
        with self._named(operation), self._context.timeline.span(WAIT_FOR_STAGES):
            try:
                self._window.wait(stage, notification, value, limit=limit, operation=operation)
            except CommTimeout:
                peer = f"rank {self._ranks[stage]} (stage {stage})"
                operation = self._context.timeline.in_step(operation)
                raise timed_out(self._context.world.rank, limit, peer, operation) from None

    @property
    def _limit(self) -> float:
        """The limit of a wait, in seconds."""
        return self._context.limits[1 if self._context.started else 0]

    @contextmanager
    def _named(self, operation: str) -> Iterator[None]:
        """Let a lost stage have its rank in the world, and what lost it, with the step."""
        try:
            yield
        except PeerLost as error:
            peer = None if error.peer is None else self._ranks[error.peer]
            raise PeerLost(
                rank=self._context.world.rank,
                peer=peer,
                operation=self._context.timeline.in_step(operation),
                cause=error.cause,
            ) from None


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
