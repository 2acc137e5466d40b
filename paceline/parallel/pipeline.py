"""Pipeline of one replica's stages, as the rank of one of them runs it.

    batch          n samples
    microbatches   M slices of it, of equal sizes up to one sample
    schedule       the order in which this stage runs them
    loss           the sum over microbatches of samples / n × the microbatch's mean

Shapes and dtypes between the stages are agreed once for each size of a batch. Each generation of
the world has its own link.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from paceline.comm.communicator import gather_states, require_same_call
from paceline.errors import CommError, ConfigError
from paceline.generation.context import GenerationContext
from paceline.generation.run import Run
from paceline.parallel.blocks import tensors_in
from paceline.parallel.interpreter import GradientSync, Interpreter, TaskTime
from paceline.parallel.link import StageLink
from paceline.parallel.meta_twin import Boundary, MetaTwin, TensorSpec
from paceline.parallel.schedules import Schedule, Task
from paceline.parallel.tied import TiedWeights

CALL = "paceline.stages()"
_TRAINING = "model.train_batch()"
_EVALUATION = "model(x)"
_PASS_LOSS = (
    "pass a function of (output, y) that returns the mean over the samples, such as "
    "torch.nn.functional.cross_entropy"
)


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options of a pipeline: the arguments of `paceline.stages`, which describes them.

    `spelled` writes cuts as the user gives them.
    """

    loss: Callable[[Any, Any], Tensor]
    microbatches: int
    cuts: Sequence[str] | None = None
    schedule: str = "1f1b"
    blocks: Sequence[str] | None = None
    example: Tensor | None = None
    checkpoint_activations: bool = False
    spelled: Callable[[Sequence[str]], str] = "cuts={}".format

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise ConfigError(f"{CALL} got {type(self.loss).__name__} as loss: {_PASS_LOSS}.")
        if self.example is not None:
            _require_samples(CALL, example=self.example)

    @property
    def first_microbatch(self) -> Tensor | None:
        """The first microbatch of the example."""
        example = self.example
        return None if example is None else example[: -(-len(example) // self.microbatches)]


@dataclass(kw_only=True, eq=False)
class Pipeline:
    """Pipeline of one replica: this rank's stage among the others.

    Attributes:
        run: whose ranks along the axis "stage" are the stages.
        replica: exchanges gradients along the axis "data".
        twin: shows the shapes between stages.
        tied: the weights that other stages have, too.
        schedule: by stage.
        options: what the user has chosen.
        times: of this stage's tasks in the last batch.
    """

    run: Run
    replica: GradientSync
    twin: MetaTwin
    tied: TiedWeights
    schedule: Schedule
    options: PipelineOptions
    times: list[TaskTime] = field(default_factory=list)
    _agreed: dict[tuple[str, TensorSpec], list[list[Boundary]]] = field(default_factory=dict)
    _context: GenerationContext | None = None
    _link: StageLink | None = None
    _batches: int = 0  # trained over the link

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copy of the stage's module is of the same stage

    def train(
        self,
        part: Callable[[Any], Any],
        parameters: Callable[[], Iterable[Tensor]],
        x: Tensor,
        y: Tensor,
    ) -> Tensor:
        """Run forward and backward of all microbatches; return the mean loss, as float64.

        Args:
            part: runs this stage's blocks.
            parameters: lists theirs.
            x: the batch, the same on all stages.
            y: its labels.
        """
        _require_samples(_TRAINING, x=x, y=y)
        if len(x) != len(y):
            raise ConfigError(
                f"{_TRAINING} got {len(x):,} samples and {len(y):,} labels: pass one label, or row "
                "of labels, a sample."
            )
        boundaries = self._boundaries(_TRAINING, x, y)
        each = zip(_cut(y, self.options.microbatches), boundaries, strict=True)
        losses = [self._loss_of(labels, len(x), of_stages[-1]) for labels, of_stages in each]
        interpreter = self._interpreter(part, parameters, x, boundaries, losses)
        own = self.schedule[self._stage]
        tasks = [task for task in own if task.microbatch < len(losses)]
        try:
            with torch.enable_grad():
                interpreter.run(tasks, self.replica, self.run.timeline.clock)
                self._batches += 1
                if self._link is not None:
                    self.tied.release(self._link, self._batches)
        finally:
            self.tied.restore()
        self.times = interpreter.times
        outputs = interpreter.outputs
        loss = (
            torch.stack([outputs[m] for m in sorted(outputs)]).sum().double() if outputs else None
        )
        if self._link is None:
            assert loss is not None
            return loss
        total = self._link.share_loss(loss, self._batches).to(x.device)
        self._link.settle()
        return total

    @torch.no_grad()
    def evaluate(self, part: Callable[[Any], Any], x: Tensor) -> Any:
        """Return the model's output for a batch, on all stages; NaN where a loss undoes it."""
        _require_samples(_EVALUATION, x=x)
        try:
            return self._evaluate(part, x)
        except CommError as error:
            self.replica.lose(error)
        whole = self.twin.boundaries(TensorSpec(tuple(x.shape), x.dtype))[-1]
        lost = [torch.full(one.shape, math.nan, device=x.device).to(one.dtype) for one in whole]
        return lost[0] if len(lost) == 1 else tuple(lost)

    def _evaluate(self, part: Callable[[Any], Any], x: Tensor) -> Any:
        boundaries = self._boundaries(_EVALUATION, x)
        interpreter = self._interpreter(part, tuple, x, boundaries, ())
        tasks = [Task("forward", m) for m in range(len(boundaries))]
        interpreter.run(tasks, self.replica, self.run.timeline.clock)
        outputs = [interpreter.outputs[m] for m in sorted(interpreter.outputs)]
        for output, of_stages in zip(outputs, boundaries, strict=False):
            _require_whole(output, of_stages[-1])
        if self._link is None:
            return _joined(outputs)
        self._link.settle()
        own = tree_map(Tensor.cpu, _joined(outputs)) if outputs else None
        communicator = self.run.context.group("stage", "steps")
        shared = gather_states(communicator, own, "the output of model(x)")[-1]
        return tree_map(lambda tensor: tensor.to(x.device), shared)

    @property
    def _stage(self) -> int:
        return self.run.context.along("stage").rank

    def _interpreter(
        self,
        part: Callable[[Any], Any],
        parameters: Callable[[], Iterable[Tensor]],
        x: Tensor,
        boundaries: Sequence[Sequence[Boundary]],
        losses: Sequence[Callable[[Any], Tensor]],
    ) -> Interpreter:
        stage = self._stage
        self._connect(boundaries)
        return Interpreter(
            part,
            parameters,
            self._link,
            inputs=_cut(x, self.options.microbatches) if stage == 0 else None,
            losses=losses if stage == len(self.schedule) - 1 else None,
            recomputes=self.options.checkpoint_activations,
        )

    def _boundaries(self, call: str, x: Tensor, y: Tensor | None = None) -> list[list[Boundary]]:
        """Return what each stage returns for each microbatch; collective where the size is new.

        Then the stages compare the labels: the last one's are of the samples that the first one
        has. Their samples may differ, as data sets that draw random numbers yield them.
        """
        spec = call, TensorSpec(tuple(x.shape), x.dtype)
        if self._context is not self.run.context:
            self._context = self.run.context
            self._link = None  # closed with the last generation's context
            self._agreed = {}
        if spec not in self._agreed:
            if len(self.schedule) > 1:
                communicator = self.run.context.group("stage", "steps")
                remedy = "pass the same batch on all stages, as paceline.loader() yields it"
                form = f"{x.dtype} of shape {tuple(x.shape)}"
                if y is not None:
                    form += f" and labels with checksum {_checksum(y):08x}"
                require_same_call(communicator, call, form, f"{call}, on all stages", remedy=remedy)
            by_size: dict[TensorSpec, list[Boundary]] = {}
            microbatches = _cut(x, self.options.microbatches)
            cuts = [TensorSpec(tuple(one.shape), one.dtype) for one in microbatches]
            for cut in cuts:
                if cut not in by_size:
                    by_size[cut] = self.twin.boundaries(cut)
            self._agreed[spec] = [by_size[cut] for cut in cuts]
        return self._agreed[spec]

    def _connect(self, boundaries: Sequence[Sequence[Boundary]]) -> None:
        """Open a link whose buffers hold all boundaries, where there is none; collective then."""
        if len(self.schedule) == 1:
            return
        size = max(sum(one.bytes for one in some) for each in boundaries for some in each[:-1])
        if self._link is None or self._link.buffer_bytes < size:
            if self._link is not None:
                self._link.close()
            context = self.run.context
            self._link = StageLink(context, size, self.tied.sizes)
            self._batches = 0
            context.keep("stages", self._link)

    def _loss_of(self, labels: Tensor, samples: int, whole: Boundary) -> Callable[[Any], Tensor]:
        def weighted(output: Any) -> Tensor:
            _require_whole(output, whole)
            loss = self.options.loss(output, labels)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ConfigError(f"loss= returned what isn't one number: {_PASS_LOSS}.")
            return loss * (len(labels) / samples)

        return weighted


def _require_samples(call: str, **batch: object) -> None:
    """Require tensors with a row for each sample."""
    for name, value in batch.items():
        if not isinstance(value, Tensor) or not value.ndim or not len(value):
            raise ConfigError(
                f"{call} got {type(value).__name__} as {name}: pass a tensor with a row for each "
                "sample."
            )


def _checksum(labels: Tensor) -> int:
    return zlib.crc32(labels.detach().cpu().contiguous().view(torch.uint8).numpy().data)


def _require_whole(output: Any, whole: Boundary) -> None:
    """Require that the last stage returns what the whole model does, not a tensor rank's part."""
    shapes = [tuple(tensor.shape) for tensor in tensors_in(output)]
    expected = [spec.shape for spec in whole]
    if shapes != expected:
        raise ConfigError(
            f"the last stage returns the shapes {shapes}, but the whole model {expected}: let the "
            "plan's last layer return all of its output on each tensor rank, as 'colwise_rep' does."
        )


def _cut(batch: Tensor, microbatches: int) -> list[Tensor]:
    """Cut a batch into microbatches; of a small one, into one a sample."""
    return [*batch.tensor_split(min(microbatches, len(batch)))]


def _joined(outputs: Sequence[Any]) -> Any:
    """Join the microbatches' outputs along their first dim."""
    if isinstance(outputs[0], Tensor):
        return torch.cat([*outputs])
    return tuple(torch.cat([*some]) for some in zip(*outputs, strict=True))
