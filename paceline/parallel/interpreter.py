"""Interpreter of a schedule: runs one stage's tasks, and puts their results to the next stages.

forward            input ◀─ stage s − 1      output ─▶ stage s + 1
backward           gradient ◀─ stage s + 1   all gradients; the input's ─▶ stage s − 1
backward_input     gradient ◀─ stage s + 1   the input's alone ─▶ stage s − 1
backward_weight    the parameters' gradients, of what `backward_input` got
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from paceline.errors import CommError
from paceline.parallel.blocks import Value, tensors_in
from paceline.parallel.divided_backward import DividedBackward
from paceline.parallel.link import StageLink
from paceline.parallel.schedules import Task


class TaskTime(NamedTuple):
    """Begin, end and wait of a task, in nanoseconds of the system's monotonic clock."""

    task: Task
    begin: int
    end: int
    waited: int


class GradientSync(Protocol):
    """Protocol of a data-parallel replica, which exchanges gradients along the axis "data"."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients of backward passes inside; a later one outside sends the sums."""

    def lose(self, error: CommError) -> None:
        """Let what follows an evaluation continue after a loss; it is undone and made again.

        Raises:
            CommError: the error, where it isn't.
        """


class Interpreter:
    """Interpreter of one stage's tasks, for one batch.

    Args:
        part: runs the stage's blocks.
        parameters: lists what gets gradients.
        link: connects the stages; None: there is one stage.
        inputs: by microbatch; None: this isn't the first stage.
        losses: on the last stage, by microbatch, a function from its output to its loss, weighted
            so that the sum of all losses is the mean over the batch; () in an evaluation. None:
            this isn't the last stage.
        recomputes: whether backward computes activations again.

    Attributes:
        outputs: on the last stage, what each forward pass has returned: losses, where there are.
        times: of the tasks.
    """

    def __init__(
        self,
        part: Callable[[Any], Any],
        parameters: Callable[[], Iterable[Tensor]],
        link: StageLink | None,
        *,
        inputs: Sequence[Tensor] | None,
        losses: Sequence[Callable[[Any], Tensor]] | None,
        recomputes: bool,
    ) -> None:
        self._part = part
        self._parameters = parameters
        self._link = link
        self._inputs = inputs
        self._losses = losses
        self._recomputes = recomputes
        # By microbatch, until their backward: leaves of a graph, its ends, and the ends' gradients.
        self._leaves: dict[int, list[Tensor]] = {}
        self._ends: dict[int, list[Tensor]] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._divided: dict[int, DividedBackward] = {}
        self._waited = 0
        self.outputs: dict[int, Any] = {}
        self.times: list[TaskTime] = []

    def run(self, tasks: Sequence[Task], replica: GradientSync, clock: Callable[[], int]) -> None:
        """Run the tasks; the last backward of parameters lets their gradients be exchanged."""
        weights = [
            n for n, task in enumerate(tasks) if task.kind in ("backward", "backward_weight")
        ]
        accumulating = set(weights[:-1])
        for number, task in enumerate(tasks):
            begin = clock()
            self._waited = 0
            with replica.no_sync() if number in accumulating else nullcontext():
                getattr(self, f"_{task.kind}")(task.microbatch)
            self.times.append(TaskTime(task, begin, clock(), self._waited))

    def _forward(self, m: int) -> None:
        leaves: list[Tensor] = []
        if self._inputs is not None:
            # With a count of writes of its own: a block may write to one of the batch's views.
            value: Value = self._inputs[m].data
        else:
            value = self._received(1, m)
            if torch.is_grad_enabled():
                leaves = [x.requires_grad_(is_differentiable(x)) for x in tensors_in(value)]
                value = tree_map(same, value)
        output = self._part(value)
        if self._losses:
            output = self._losses[m](output)
        ends = tensors_in(output)
        if torch.is_grad_enabled():
            self._leaves[m] = leaves
            self._ends[m] = ends
        if self._losses is None:
            self._put(1, output, m)
        else:
            self.outputs[m] = output.detach() if torch.is_grad_enabled() else output

    def _backward(self, m: int) -> None:
        self._receive_gradients(m)
        ends, gradients = self._with_graphs(m)
        if ends:
            torch.autograd.backward(ends, gradients)
        leaves = self._leaves.pop(m)
        self._send_gradients(leaves, [x.grad for x in leaves], m)

    def _backward_input(self, m: int) -> None:
        self._receive_gradients(m)
        leaves = self._leaves.pop(m)
        wanted = [x for x in leaves if x.requires_grad]
        divided = DividedBackward(
            *self._with_graphs(m), wanted, self._parameters(), whole=self._recomputes
        )
        self._divided[m] = divided
        found = iter(divided.inputs())
        self._send_gradients(leaves, [next(found) if x.requires_grad else None for x in leaves], m)

    def _backward_weight(self, m: int) -> None:
        self._divided.pop(m).weights()

    def _with_graphs(self, m: int) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return a microbatch's ends that have a graph, and their gradients, and drop them."""
        pairs = zip(self._ends.pop(m), self._gradients.pop(m), strict=True)
        found = [(end, gradient) for end, gradient in pairs if end.requires_grad]
        return [end for end, _ in found], [gradient for _, gradient in found]

    def _receive_gradients(self, m: int) -> None:
        if self._losses is not None:
            self._gradients[m] = [None]
            return
        arrived = iter(tensors_in(self._received(-1, m)))
        self._gradients[m] = [
            next(arrived) if is_differentiable(end) else None for end in self._ends[m]
        ]

    def _send_gradients(
        self, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None], m: int
    ) -> None:
        """Send the leaves' gradients; zeros for one on which no loss depends."""
        if self._inputs is not None:
            return
        pairs = zip(leaves, gradients, strict=True)
        self._put(
            -1,
            tuple(
                torch.zeros_like(x) if gradient is None else gradient
                for x, gradient in pairs
                if x.requires_grad
            ),
            m,
        )

    def _received(self, to: int, m: int) -> Value:
        assert self._link is not None
        value = self._link.receive(to, m)
        self._waited += self._link.waited
        return value

    def _put(self, to: int, value: Value, m: int) -> None:
        assert self._link is not None
        self._link.send(to, value, m)


class _Same(torch.autograd.Function):
    """Identity of a leaf, in its memory: in-place operations are allowed on it, not on a leaf."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def same(x: Tensor) -> Tensor:
    """Return a leaf's values as what isn't a leaf, in its memory."""
    found: Tensor = _Same.apply(x)  # type: ignore[no-untyped-call]
    return found


def is_differentiable(x: Tensor) -> bool:
    """Return whether a tensor may have gradients."""
    return x.is_floating_point() or x.is_complex()
