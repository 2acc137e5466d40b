"""Section `step` of `gpu.py`: a ResNet-50's step by plain torch, DDP and Paceline's library.

All three live in this process, as worlds of one, and run in turns. The model is in channels-last
layout, forward and backward are in bfloat16, and the optimizer is torch's fused SGD. The samples
are in the GPU's memory. The first kind of step keeps the GPU busy; the second is limited by what
the host does for a step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from gpu_rows import Row, Setting
from rounds import paired_ratio, rotated
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from workloads import loss_of, workload_of

import paceline
from paceline.config.optim import OptimConfig
from paceline.wiring.model import make_optimizer

Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of step.

    Attributes:
        name: says what limits it.
        model, batch, size: the work; the size of an image in pixels.
        steps: of a turn.
        rounds: at most.
        target: the largest ratio of Paceline's time to plain torch's that the project asks for.
        words: the same in words.
    """

    name: str
    model: str = "resnet50"
    batch: int
    size: int
    steps: int
    rounds: int
    target: float
    words: str


BUSY = Kind(
    name="busy GPU", batch=256, size=224, steps=8, rounds=13, target=1 / 0.99, words="<= 1/0.99"
)
HOST_BOUND = Kind(
    name="host-bound", batch=8, size=64, steps=20, rounds=25, target=1.08, words="<= 1.08"
)
SMALL = Kind(
    name="small", model="resnet20", batch=2, size=32, steps=1, rounds=2, target=1.08, words=""
)


def step(setting: Setting) -> Iterator[Row]:
    """Yield the rows of all kinds of steps."""
    kinds = [SMALL] if setting.small else [BUSY, HOST_BOUND]
    for number, kind in enumerate(kinds):
        seconds = setting.left / (len(kinds) - number)
        yield from _rows(kind, setting, _times(kind, setting, time.monotonic() + seconds))


def _times(kind: Kind, setting: Setting, end: float) -> Mapping[str, list[float]]:
    """Measure seconds a step, a value a round, by the contenders' names."""
    with ExitStack() as stack:
        contenders = {
            "plain torch": Training(kind, setting.device).step,
            "DDP": stack.enter_context(_ddp(kind, setting.device)),
            "Paceline": stack.enter_context(_library(kind, setting.device)),
        }
        for run in contenders.values():
            _seconds(run, 3, setting.device)  # DDP and Paceline learn the order; torch warms up
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(kind.rounds):
            began = time.monotonic()
            for name in rotated(list(contenders), number):
                times[name].append(_seconds(contenders[name], kind.steps, setting.device))
            now = time.monotonic()
            if number > 0 and now + (now - began) > end:
                break
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()  # other processes need the memory
    return times


def _rows(kind: Kind, setting: Setting, times: Mapping[str, list[float]]) -> Iterator[Row]:
    plain = times["plain torch"]
    for name, found in times.items():
        ratio = paired_ratio(found, plain)
        asked = name == "Paceline" and not setting.small
        rate = kind.batch / median(found)
        yield Row(
            name=f"step, {kind.name}, batch {kind.batch} of {kind.size} x {kind.size}: {name}",
            value=1000 * median(found),
            measured=f"{1000 * median(found):.2f} ms, {rate:.0f} images/s",
            target=f"{kind.words} of plain torch's time" if asked else "",
            met=ratio.median <= kind.target if asked else None,
            peer="" if found is plain else "plain torch's time",
            ratio=None if found is plain else ratio,
        )


class Training:
    """Model, optimizer, and a batch in the device's memory.

    Args:
        kind: the work.
        device: where.
    """

    def __init__(self, kind: Kind, device: torch.device) -> None:
        torch.manual_seed(0)
        work = workload_of(kind.model)
        model = work.build()
        self.model = model.to(device=device, memory_format=torch.channels_last)
        self.optimizer = make_optimizer(
            self.model, OptimConfig(base_learning_rate=1e-3), kind.batch
        )
        for group in self.optimizer.param_groups:
            group["fused"] = True
        inputs, targets = work.samples(kind.batch, kind.size)
        self._inputs, self._targets = inputs.to(device), targets.to(device)
        self._device = device

    def step(self) -> None:
        """Run the plain recipe."""
        with torch.autocast(self._device.type, torch.bfloat16, self._device.type == "cuda"):
            loss = loss_of(self.model(self._inputs), self._targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@contextmanager
def _ddp(kind: Kind, device: torch.device) -> Iterator[Step]:
    """Give a step by DistributedDataParallel with its fastest settings, in a world of one."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    training = Training(kind, device)
    with warnings.catch_warnings():  # 2.13 has a new name for broadcast_buffers, 2.11 hasn't
        warnings.simplefilter("ignore", FutureWarning)
        training.model = DistributedDataParallel(
            training.model, gradient_as_bucket_view=True, broadcast_buffers=False
        )
    yield training.step
    dist.destroy_process_group()


@contextmanager
def _library(kind: Kind, device: torch.device) -> Iterator[Step]:
    """Give a step by `paceline.parallelize`, in a world of one."""
    with paceline.join(device=device) as world:
        training = Training(kind, device)
        paceline.parallelize(training.model, training.optimizer, world)

        def run() -> None:
            with world.step():
                training.step()

        yield run


def _seconds(run: Step, steps: int, device: torch.device) -> float:
    """Return seconds a step, after one that isn't timed."""
    run()
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        run()
    _synchronize(device)
    return (time.perf_counter() - began) / steps


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
