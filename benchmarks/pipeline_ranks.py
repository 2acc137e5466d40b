"""A rank of `pipeline.py`: one stage of a model, by torch's pipeline runtime and by Paceline's.

    gpipe, 1f1b, zb-h1         Paceline's, as a script has it: `paceline.stages`, `train_batch`
    torch-gpipe, torch-1f1b    `ScheduleGPipe` and `Schedule1F1B` of torch.distributed.pipelining,
                               over Gloo
    line                       a plain stream of a step's activations, and of as many bytes back

Model, cut, loss, samples, microbatches and optimizer are the same. One thread a rank, on a core of
its own, which it shares with those that move bytes. A process has one world of Paceline, and so one
of its rows. Beside times of steps, a rank answers two questions:

    parts:NAME     what the passes of its stage take without a link, in the order of a schedule, and
                   the optimizer's step
    spans:NAME     when its stage has run which task of a step

`waiting` is a model whose passes wait in place of computing: of it, only spans mean anything.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from models import Block
from rank_setup import RankSetup, Variant, join_gloo, nothing, open_store
from ranks import keep_to_own_cores, listen, timed
from stream import Stream
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

import paceline
from paceline.cluster.supervision.allocator import keep_freed_memory
from paceline.models.zoo import build_model
from paceline.parallel.interpreter import Interpreter
from paceline.parallel.meta_twin import TensorSpec
from paceline.parallel.schedules import SCHEDULES, make_schedule

MASTER_PORT = 29500
TORCH = {"torch-gpipe": ScheduleGPipe, "torch-1f1b": Schedule1F1B}
LABELS = 1000
VOCABULARY = 8192
LENGTH = 64  # tokens of a sequence
WIDTH = 768
MLP_WIDTH = 512


@dataclass(frozen=True, kw_only=True)
class Setting(RankSetup):
    """Setting of a rank.

    Attributes:
        model: "gpt", "resnet50", "mlp" or "waiting".
        batch: samples of a step.
        microbatches: into how many it is cut.
        layers: blocks of a "gpt"; layers of a stage of an "mlp".
        image_size: of "resnet50".
        cuts: the names of the children that begin stages; empty: the middle of a "gpt", the third
            layer of "resnet50".
        wait_ms: of a pass of "waiting", of which the weights' part takes as long as the inputs'.
        warm_up: steps of Paceline's rows before those that are timed.
        master: the address of rank 0.
    """

    model: str
    batch: int
    microbatches: int
    layers: int
    image_size: int
    cuts: list[str]
    wait_ms: float
    warm_up: int
    master: str


class Embedding(nn.Module):
    """Embeds tokens and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) to (batch, length, WIDTH)."""
        states: Tensor = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return states


class Head(nn.Module):
    """Scores of the next tokens, (batch, VOCABULARY, length), as cross entropy takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Map (batch, length, WIDTH) to scores."""
        return torch.transpose(self.scores(self.norm(states)), 1, 2)


class _Waits(torch.autograd.Function):
    """What takes some seconds forward, and some others backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return above[0], None, None


class Waiting(nn.Module):
    """Stage whose passes wait: forward, backward for its input, and backward for its weight.

    The first stage needs no gradients of its input, so its weight's take as long as both.
    """

    def __init__(self, seconds: float, *, first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds = seconds
        self.weight_seconds = seconds * (1 + first)

    def forward(self, x: Tensor) -> Tensor:
        """Return x, plus 0."""
        through: Tensor = _Waits.apply(x, self.seconds, self.seconds)
        weight: Tensor = _Waits.apply(self.weight, 0.0, self.weight_seconds)
        return through + weight


def whole_model(setting: Setting) -> tuple[nn.Sequential, list[str]]:
    """Make a model, the same on all ranks, and the names of the children that begin stages."""
    torch.manual_seed(0)
    if setting.model == "gpt":
        blocks = {f"block{n}": Block(WIDTH, WIDTH // 64) for n in range(setting.layers)}
        model = _sequence(embedding=Embedding(), **blocks, head=Head())
        each = setting.layers / setting.ranks
        even = [f"block{round(n * each)}" for n in range(1, setting.ranks)]
        return model, setting.cuts or even
    if setting.model == "resnet50":
        net = build_model("resnet50", num_labels=LABELS, num_channels=3)
        layers = [net.get_submodule(f"layer{n}") for n in range(1, 5)]
        blocks = {
            f"layer{n}_{m}": block
            for n, at in enumerate(layers, 1)
            for m, block in at.named_children()
        }
        stem = nn.Sequential(net.conv1, net.bn1, nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), net.fc)
        model = _sequence(stem=stem, **blocks, end=end)
        return model, setting.cuts or ["layer3_0"]
    names = [f"part{n}" for n in range(setting.ranks)]
    if setting.model == "waiting":
        seconds = setting.wait_ms / 1e3
        waiting = {name: Waiting(seconds, first=name == names[0]) for name in names}
        return _sequence(**waiting), names[1:]
    return _sequence(**{name: _mlp(setting.layers) for name in names}), names[1:]


def _sequence(**children: Any) -> nn.Sequential:
    sequence = nn.Sequential()
    for name, child in children.items():
        sequence.add_module(name, child)
    return sequence


def _mlp(layers: int) -> nn.Sequential:
    pairs = [(nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def batch_of(setting: Setting) -> tuple[Tensor, Tensor]:
    """Make the samples of all steps, and their labels; the same on all ranks."""
    random = torch.Generator().manual_seed(1)
    if setting.model == "gpt":
        shape = (setting.batch, LENGTH + 1)
        tokens = torch.randint(VOCABULARY, shape, generator=random)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if setting.model == "resnet50":
        shape = (setting.batch, 3, setting.image_size, setting.image_size)
        labels = torch.randint(LABELS, (setting.batch,), generator=random)
        return torch.randn(shape, generator=random), labels
    numbers = torch.randn(2, setting.batch, MLP_WIDTH, generator=random)
    return numbers[0], numbers[1]


def loss_of(setting: Setting) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of the model's outputs and labels."""
    classes = setting.model in ("gpt", "resnet50")
    return functional.cross_entropy if classes else functional.mse_loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of all rows."""
    return torch.optim.SGD(model.parameters(), lr=1e-3)


class Stage:
    """This rank's stage and its batch, which all rows but Paceline's share."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.x, self.y = batch_of(setting)
        self.loss = loss_of(setting)
        self.first = setting.rank == 0
        self.last = setting.rank == setting.ranks - 1
        model, cuts = whole_model(setting)
        names = [name for name, _ in model.named_children()]
        ends = [0, *(names.index(cut) for cut in cuts), len(names)]
        stages = [model[a:b] for a, b in pairwise(ends)]
        self.boundaries = _boundaries(stages, self.x.tensor_split(setting.microbatches)[0])
        self.part = stages[setting.rank].train()
        self.optimizer = optimizer_of(self.part)

    @property
    def bytes(self) -> int:
        """Of the activations of a microbatch, at the largest cut."""
        return max(spec.bytes for spec in self.boundaries)

    def step_optimizer(self) -> None:
        """Update this stage's weights."""
        self.optimizer.step()
        self.optimizer.zero_grad()


@torch.no_grad()
def _boundaries(stages: Sequence[nn.Module], microbatch: Tensor) -> list[TensorSpec]:
    """Return what each stage but the last returns for a microbatch."""
    value = microbatch
    boundaries = []
    for stage in stages[:-1]:
        value = stage.eval()(value)
        boundaries.append(TensorSpec(tuple(value.shape), value.dtype))
    return boundaries


def line(stage: Stage, row: str) -> Variant:
    """Stream a step's activations of the largest cut, and as many bytes the other way."""
    setting = stage.setting
    size = setting.microbatches * stage.bytes
    where = {"rank": setting.rank, "ranks": setting.ranks, "address": setting.address}
    stream = Stream(open_store(setting, row), **where, size=size)

    def step() -> None:
        stream.start()
        stream.wait()

    return Variant(step=step, finish=nothing, result=list)


def torchs(stage: Stage, row: str) -> Variant:
    """Train by torch's runtime."""
    setting = stage.setting
    join_gloo(setting, open_store(setting, "torch"))
    where = (stage.part, setting.rank, setting.ranks, torch.device("cpu"))
    schedule = TORCH[row](PipelineStage(*where), setting.microbatches, loss_fn=stage.loss)
    inputs = (stage.x,) if stage.first else ()
    target = {"target": stage.y} if stage.last else {}

    def step() -> None:
        schedule.step(*inputs, **target)
        stage.step_optimizer()

    return Variant(step=step, finish=nothing, result=lambda: [*stage.part.parameters()])


def paceline_s(stage: Stage, row: str, times: dict[str, Callable[[], Any]]) -> Variant:
    """Train by Paceline, as a script does; `times` gets what returns a step's."""
    setting = stage.setting
    os.environ |= {
        "RANK": str(setting.rank),
        "WORLD_SIZE": str(setting.ranks),
        "LOCAL_RANK": str(setting.local_rank),
        "LOCAL_WORLD_SIZE": str(setting.ranks_by_address[setting.address]),
        "GROUP_RANK": str(setting.machine),
        "MASTER_ADDR": setting.master,
        "MASTER_PORT": str(MASTER_PORT),
        "TORCHELASTIC_RUN_ID": "pipeline",
    }
    world = paceline.join(mesh={"stage": setting.ranks}, snapshots=False, replica_check=False)
    whole, cuts = whole_model(setting)
    settings = {"microbatches": setting.microbatches, "cuts": cuts, "schedule": row}
    model = paceline.stages(whole, world, loss=stage.loss, **settings)
    optimizer = optimizer_of(model)
    model, optimizer = paceline.parallelize(model, optimizer, world)

    def step() -> None:
        with world.step():
            model.train_batch(stage.x, stage.y)
            optimizer.step()
            optimizer.zero_grad()

    times[row] = lambda: model._pipeline.times
    return Variant(step=step, finish=world.settle, result=lambda: [*model.parameters()])


class _NoLink:
    """Link of a stage that is alone: whatever it waits for is there."""

    waited = 0

    def __init__(self, stage: Stage) -> None:
        bounds = [None, *stage.boundaries, None][stage.setting.rank :]
        self._specs = {1: bounds[0], -1: bounds[1]}

    def receive(self, to: int, microbatch: int) -> Any:
        """Return as much as would arrive."""
        spec = self._specs[to]
        value = torch.full(spec.shape, 1e-3, dtype=spec.dtype)
        return value if to > 0 else (value,)

    def send(self, to: int, value: Any, microbatch: int) -> None:
        """Drop it."""


def parts(stage: Stage, schedule: str, steps: int) -> dict[str, float]:
    """Return the mean seconds of each kind of pass, and of the optimizer's step, once warm."""
    all_steps = [_parts(stage, schedule) for _ in range(steps + 1)][1:]
    return {kind: fmean(one[kind] for one in all_steps) for kind in all_steps[0]}


def _parts(stage: Stage, schedule: str) -> dict[str, float]:
    setting = stage.setting
    count = setting.microbatches
    tasks = make_schedule(schedule, setting.ranks, count)[setting.rank]
    weighted = [
        lambda output, labels=labels: stage.loss(output, labels) / count
        for labels in stage.y.tensor_split(count)
    ]
    alone: Any = _NoLink(stage)
    interpreter = Interpreter(
        stage.part,
        stage.part.parameters,
        alone,
        inputs=stage.x.tensor_split(count) if stage.first else None,
        losses=weighted if stage.last else None,
        recomputes=False,
    )
    alone = SimpleNamespace(no_sync=nullcontext)
    interpreter.run(tasks, alone, time.monotonic_ns)
    seconds: dict[str, list[float]] = defaultdict(list)
    for task, begin, end, _ in interpreter.times:
        seconds[task.kind].append((end - begin) / 1e9)
    begin = time.monotonic_ns()
    stage.step_optimizer()
    optimizer = (time.monotonic_ns() - begin) / 1e9
    return {kind: fmean(values) for kind, values in seconds.items()} | {"optimizer": optimizer}


def spans(variant: Variant, times: Callable[[], Any], steps: int) -> list[list[Any]]:
    """Run steps; return of each what this stage ran: kind, microbatch, seconds of start and end."""
    found = []
    for _ in range(steps):
        variant.step()
        found.append(
            [
                [task.kind, task.microbatch, (begin + waited) / 1e9, end / 1e9]
                for task, begin, end, waited in times()
            ]
        )
    variant.finish()
    return found


def main() -> None:
    """Be a rank: answer what the parent asks until it closes its end."""
    setting = Setting(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    keep_to_own_cores(setting.rank, setting.ranks)
    keep_freed_memory()  # as any worker of Paceline does; torch's rows have it too
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(commands,), daemon=True).start()
    stage = Stage(setting)
    times: dict[str, Callable[[], Any]] = {}
    makers = dict.fromkeys(TORCH, torchs) | {"line": line}
    makers |= dict.fromkeys(SCHEDULES, partial(paceline_s, times=times))
    variants = {row: makers[row](stage, row) for row in setting.rows}
    for row, variant in variants.items():
        timed(variant, setting.warm_up if row in SCHEDULES else 1)
    print("ready", flush=True)
    while True:
        row, steps = commands.get().split()
        question, _, name = row.rpartition(":")
        if question == "parts":
            answer: Any = parts(stage, name, int(steps))
        elif question == "spans":
            answer = spans(variants[name], times[name], int(steps))
        else:
            answer = timed(variants[row], int(steps))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
