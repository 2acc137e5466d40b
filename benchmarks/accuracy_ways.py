"""A rank of `time_to_accuracy.py`: trains CIFAR-10 by one way of exchange, and times its steps.

    ddp:MB            torch's DistributedDataParallel with that `bucket_cap_mb`
    powersgd:RANK     the same with torch's PowerSGD hook, of that matrix rank, in one bucket: with
                      several the hook's callbacks begin collectives in any order, and Gloo's ranks
                      then wait for each other for ever
    postlocal:PERIOD  the same with torch's post-localSGD hook and `model_averaging`
    allreduce         Paceline's; `notified`, `notified-bf16` and `notified-int8` as well
    average:OPTIONS   Paceline's averaging, as sync="average:every=16,outer=diloco"; average-bf16,
                      -int8, -int4 and -topk (the largest 2 %) as well
    none              no exchange: each rank trains alone

Some begin with steps of plain DDP: the *warm-up*. Its steps are timed apart from the others.

A rank reads lines and answers each with one of JSON:

    train        trains to the end: images right of this rank's test images at each evaluation
    time STEPS   {"warm_up": seconds a step, "step": seconds a step, "sent": bytes a step,
                 "peak": bytes in the busiest second}
"""

from __future__ import annotations

import json
import math
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rank_setup import RankSetup, join_gloo, nothing, open_store, run_of
from ranks import keep_to_own_cores, listen
from table import method_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from paceline.cluster.supervision.allocator import keep_freed_memory
from paceline.config.world import SyncConfig
from paceline.models.zoo import build_model
from paceline.update.outer.average import Average, parse_average
from paceline.wiring.average import average_weights
from paceline.wiring.exchange import replicate

MEAN = torch.tensor([125.3, 123.0, 113.9]).view(1, 3, 1, 1)
STD = torch.tensor([63.0, 62.1, 66.7]).view(1, 3, 1, 1)
ONE_BUCKET = 1e5  # MiB
UNTIMED = 2  # steps in which DDP rebuilds its buckets, and hooks change
TIMED_PERIODS = 3
TIMED_WARM_UP = 4  # steps, in place of the warm-up's own number, where steps are only timed
PACELINE = {
    "allreduce": ("allreduce", "fp32"),
    "notified": ("notified", "fp32"),
    "notified-bf16": ("notified", "bf16"),
    "notified-int8": ("notified", "int8"),
    "average": ("average", "fp32"),
    "average-bf16": ("average", "bf16"),
    "average-int8": ("average", "int8"),
    "average-int4": ("average", "int4"),
    "average-topk": ("average", "topk:0.02"),
}


@dataclass(frozen=True, kw_only=True)
class Setting(RankSetup):
    """Setting of a rank: where it runs, its row in `rows`, and the work.

    Attributes:
        model: a key of MODELS.
        data: a folder of arrays: train_images.npy (n, 3, 32, 32) of uint8, train_labels.npy (n,),
            and the same of test.
        batch: images a rank.
        epochs: passes over the images.
        evaluate: steps between evaluations.
        warm_up: steps of plain DDP before PowerSGD or averaging begins.
        seed: of the weights, the order and the augmentation.
        interface: the network interface whose bytes are counted.
    """

    model: str
    data: str
    batch: int
    epochs: int
    evaluate: int
    warm_up: int
    seed: int
    interface: str

    @property
    def row(self) -> str:
        """The way of exchange."""
        return self.rows[0]


class WideHead(nn.Sequential):
    """Three small convolutions and two wide linear layers: many bytes, little computation."""

    def __init__(self, width: int = 2048) -> None:
        layers: list[nn.Module] = []
        for before, after in ((3, 24), (24, 48), (48, 128)):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]
            layers += [nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(128 * 16, width), nn.ReLU(inplace=True)]
        layers += [nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, 10)]
        super().__init__(*layers)


MODELS: Mapping[str, tuple[Callable[[], nn.Module], float]] = {
    "resnet20": (partial(build_model, "resnet20", num_labels=10, num_channels=3), 0.1),
    "wide": (WideHead, 0.05),
}
"""Models, with the learning rate for a global batch of 128."""


@dataclass(frozen=True)
class Way:
    """One way of exchange.

    Attributes:
        step: runs a step on inputs and targets.
        finish: installs what the last step left under way.
        period: steps after which the exchange repeats itself.
        warm_up: steps of plain DDP at its start.
    """

    step: Callable[[Tensor, Tensor], None]
    finish: Callable[[], None] = nothing
    period: int = 1
    warm_up: int = 0


class Training:
    """A model, its optimizer and schedule, and this rank's images."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(setting.seed)
        build, rate = MODELS[setting.model]
        self.setting = setting
        self.model: nn.Module = build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = setting.batch * setting.ranks
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=rate * images / 128,
            momentum=0.9,
            nesterov=True,
            weight_decay=1e-4,
            fused=True,
        )
        self.images, self.labels = (_load(setting, "train", what) for what in ("images", "labels"))
        self.steps_an_epoch = len(self.images) // images
        self.steps = self.steps_an_epoch * setting.epochs
        factor = partial(_factor, warm=self.steps_an_epoch / 2, steps=self.steps)
        self.rate = LambdaLR(self.optimizer, factor)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's inputs, augmented, and targets, by the seed and the step."""
        epoch, number = divmod(step, self.steps_an_epoch)
        setting = self.setting
        order = np.random.default_rng([setting.seed, epoch]).permutation(len(self.images))
        first = (number * setting.ranks + setting.rank) * setting.batch
        chosen = order[first : first + setting.batch]
        random = np.random.default_rng([setting.seed, step, setting.rank])
        inputs = F.pad(_normalised(self.images[chosen]), (4, 4, 4, 4))
        top, left = (torch.from_numpy(random.integers(0, 9, len(chosen))) for _ in range(2))
        side = torch.arange(32)
        mirrored = torch.from_numpy(random.random(len(chosen)) < 0.5)[:, None]
        columns = left[:, None] + torch.where(mirrored, side.flip(0), side)
        rows = (top[:, None] + side)[:, :, None]
        cropped = inputs[torch.arange(len(chosen))[:, None, None], :, rows, columns[:, None, :]]
        return cropped.permute(0, 3, 1, 2), torch.from_numpy(self.labels[chosen])

    def step(self, forward: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        """Run the plain recipe; `forward` is the model, or wraps it."""
        F.cross_entropy(forward(inputs), targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _factor(step: int, warm: float, steps: int) -> float:
    """Return the learning rate's factor: linear from 0, then a cosine to 0."""
    return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)))


def _load(setting: Setting, part: str, what: str) -> np.ndarray:
    return np.load(Path(setting.data) / f"{part}_{what}.npy", mmap_mode="r")


def _normalised(images: np.ndarray) -> Tensor:
    return (torch.from_numpy(np.array(images)).float() - MEAN) / STD


def make(setting: Setting, training: Training) -> Way:
    """Make the way that the setting's row names; collective."""
    method = method_of(setting.row)
    if method == "none":
        return Way(partial(training.step, training.model))
    if method in PACELINE:
        return _paceline(setting, training, method)
    number = float(setting.row.partition(":")[2])
    join_gloo(setting, open_store(setting, "gloo"))
    with warnings.catch_warnings():  # 2.13 has a new name for broadcast_buffers, 2.11 hasn't
        warnings.simplefilter("ignore", FutureWarning)
        model = DistributedDataParallel(
            training.model,
            bucket_cap_mb={"ddp": number, "powersgd": ONE_BUCKET}.get(method, 25),
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )
    step = partial(training.step, model)
    if method == "ddp":
        return Way(step)
    if method == "powersgd":
        power = power_sgd.PowerSGDState(
            None, matrix_approximation_rank=int(number), start_powerSGD_iter=setting.warm_up
        )
        model.register_comm_hook(power, power_sgd.powerSGD_hook)
        return Way(step, warm_up=setting.warm_up)
    return _post_local(setting, training, model, int(number))


def _post_local(
    setting: Setting, training: Training, model: DistributedDataParallel, period: int
) -> Way:
    """Return torch's post-local SGD: a rank is its own subgroup, as one a machine is."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # its import warns

    subgroup, _ = dist.new_subgroups(group_size=1)
    state = post_local.PostLocalSGDState(
        None, subgroup, setting.warm_up, post_local_gradient_allreduce=False
    )
    model.register_comm_hook(state, post_local.post_localSGD_hook)
    averager = PeriodicModelAverager(period=period, warmup_steps=setting.warm_up)
    training.optimizer = PostLocalSGDOptimizer(training.optimizer, averager)
    return Way(partial(training.step, model), period=period, warm_up=setting.warm_up)


def _paceline(setting: Setting, training: Training, method: str) -> Way:
    sync, wire = PACELINE[method]
    config = SyncConfig(sync=sync, wire=wire)
    run = run_of(setting, open_store(setting, "paceline"))
    average = average_of(setting.row)
    if average is None:
        replica = replicate(training.model, training.optimizer, run, config)
    else:
        steps = training.steps
        replica = average_weights(training.model, training.optimizer, run, config, average, steps)
    numbers = count()

    def step(inputs: Tensor, targets: Tensor) -> None:
        replica.begin(next(numbers), 1 / setting.ranks)
        training.step(training.model, inputs, targets)
        replica.end()

    period = 1 if average is None else average.phases[-1][1]
    return Way(step, finish=replica.settle, period=period)


def average_of(row: str) -> Average | None:
    """Return the averaging that a row such as "average-int8:every=16" describes; None: none."""
    method, colon, text = row.partition(":")
    return parse_average(method.partition("-")[0] + colon + text)


def train(setting: Setting) -> list[int]:
    """Train to the end; return the images right of this rank's test images, by evaluation."""
    training = Training(setting)
    way = make(setting, training)
    store, right = open_store(setting, "evaluations"), []
    for step in range(training.steps):
        way.step(*training.batch(step))
        training.rate.step()
        if (step + 1) % setting.evaluate == 0 or step + 1 == training.steps:
            way.finish()
            model = _mean_model(setting, training, store, len(right))
            right.append(_right(setting, model))
    return right


def _mean_model(setting: Setting, training: Training, store: dist.Store, number: int) -> nn.Module:
    """Return a model whose weights and statistics are the means of all ranks', through files."""
    folder = Path(setting.store).parent
    mine = {name: value.clone() for name, value in training.model.state_dict().items()}
    torch.save(mine, folder / f"{number}.{setting.rank}.pt")
    store.set(f"{number}.{setting.rank}", "written")
    store.wait([f"{number}.{rank}" for rank in range(setting.ranks)])
    all_states = [
        torch.load(folder / f"{number}.{rank}.pt", weights_only=True)
        for rank in range(setting.ranks)
    ]
    model = MODELS[setting.model][0]()
    model.load_state_dict(
        {
            name: torch.stack([state[name] for state in all_states]).mean(0)
            if value.is_floating_point()
            else value
            for name, value in mine.items()
        }
    )
    (folder / f"{number - 1}.{setting.rank}.pt").unlink(missing_ok=True)  # all have read it
    return model.eval()


@torch.no_grad()
def _right(setting: Setting, model: nn.Module) -> int:
    """Return how many of this rank's test images a model gets right."""
    images, labels = (_load(setting, "test", what) for what in ("images", "labels"))
    right = 0
    for first in range(setting.rank * 500, len(images), setting.ranks * 500):
        part = slice(first, first + 500)
        right += int((model(_normalised(images[part])).argmax(1).numpy() == labels[part]).sum())
    return right


def measure(setting: Setting, steps: int) -> dict[str, float]:
    """Time steps, three periods at least; of a way with a warm-up, some of a shorter one first.

    What travels when the clock starts stands for what travels when it stops.
    """
    warm = min(setting.warm_up, TIMED_WARM_UP)
    training = Training(setting := replace(setting, warm_up=warm))
    way = make(setting, training)
    batches = map(training.batch, count())

    def seconds(number: int) -> float:
        start = time.perf_counter()
        for _ in range(number):
            way.step(*next(batches))
        return time.perf_counter() - start

    first = seconds(UNTIMED)
    more = way.warm_up - UNTIMED
    in_warm_up = seconds(more) / more if more > 0 else first / UNTIMED
    seconds(way.period if way.period > 1 else UNTIMED)
    periods = math.ceil(steps / way.period)
    steps = (periods if way.period == 1 else max(TIMED_PERIODS, periods)) * way.period
    with _Sent(setting.interface) as sent:
        taken = seconds(steps)
    way.finish()
    return {
        "warm_up": in_warm_up,
        "step": taken / steps,
        "sent": sent.bytes / steps,
        "peak": max(sent.peak, sent.bytes / taken),
    }


class _Sent:
    """Counts the bytes that leave by an interface, in all and in the busiest second."""

    def __init__(self, interface: str) -> None:
        self._interface, self._end = interface, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bytes sent")
        self.bytes, self.peak = 0, 0.0

    def __enter__(self) -> _Sent:
        self._first = self._now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.bytes = self._now() - self._first

    def _watch(self) -> None:
        before, then, ended = self._first, time.perf_counter(), False
        while not ended:
            ended = self._end.wait(1.0)
            now, instant = self._now(), time.perf_counter()
            if not ended or self.peak == 0.0:
                self.peak = max(self.peak, (now - before) / (instant - then))
            before, then = now, instant

    def _now(self) -> int:
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, colon, numbers = line.partition(":")
            if colon and name.strip() == self._interface:
                return int(numbers.split()[8])
        raise SystemExit(f"there is no network interface {self._interface}.")


def main() -> None:
    setting = Setting(**json.loads(sys.argv[1]))
    keep_to_own_cores(setting.rank, setting.ranks)
    torch.set_num_threads(1)
    keep_freed_memory()
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(commands,), daemon=True).start()
    print("ready", flush=True)
    while True:
        what, *numbers = commands.get().split()
        answer = train(setting) if what == "train" else measure(setting, int(numbers[0]))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
