"""A training step in several ways, which differ in the exchange and in nothing else.

    none           no exchange: each rank trains alone
    floor          no exchange, but two plain threads a rank stream as many bytes both ways
    floor-bf16     the same with half of the bytes, as bfloat16 has
    floor-int8     the same with a byte a value, and a scale for each 256
    ddp:MB         torch's DistributedDataParallel with that `bucket_cap_mb`
    ddp-bf16:MB    the same with a hook that adds gradients up in bfloat16
    allreduce      Paceline's, with the trainer's bucket size; allreduce:MB with another
    notified       Paceline's on windows: shared memory on one machine, TCP between two
    notified-bf16  the same with that wire between machines; notified-int8 with the other;
                   notified-sharded: each rank updates its part of the model for all
    auto           the exchange that `--sync auto` chooses, after its trials
    default        the same from a run's first step on; the run's length is unknown
    line           no training: the floor's stream alone

Model, layout, optimizer, loss and samples are the same. The *floor* moves the bytes that a ring's
all_reduce moves per rank, 2 (N - 1) / N of the gradients' each way; the stream starts with the
forward, and a step ends when both its arithmetic and its stream are done: that is the ideal
max(Tf + Tb, Tc), in which communication hides under the backward and the next forward alike, as
measured on cores that must also move the bytes. Nothing is cast for it.

DDP has its fastest settings: `gradient_as_bucket_view` (gradients are not copied back) and no
broadcast of buffers before each forward (Paceline averages them in every step). Its hook is torch's
own `bf16_compress_hook`, which refuses CPUs.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from rank_setup import RankSetup, Variant, join_gloo, nothing, open_store, run_of
from ranks import keep_to_own_cores, serve
from stream import Stream
from table import method_of, size_of
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel
from workloads import loss_of, workload_of

from paceline.codecs.codecs import CODECS
from paceline.config.optim import OptimConfig
from paceline.config.world import SyncConfig
from paceline.errors import Message
from paceline.generation.notes import Notes
from paceline.replica.replica import Replica
from paceline.run.autotune.autotuner import TIMED, UNTIMED, TrialSetting
from paceline.run.autotune.trials import steps_of_trials
from paceline.run.precision import DTYPES
from paceline.wiring.candidates import CANDIDATES
from paceline.wiring.exchange import SYNCHRONIZERS, replicate
from paceline.wiring.model import make_optimizer


@dataclass(frozen=True, kw_only=True)
class Setting(RankSetup):
    """Setting of a rank: where it runs, and the work."""

    model: str
    image_size: int
    batch: int
    dtype: str


def make(setting: Setting, row: str) -> Variant:
    """Make the variant that a row such as `ddp:25` names; collective."""
    bucket_mb, connections = size_of(row)
    more = {"connections": connections} if connections > 1 else {}
    return MAKERS[method_of(row)](setting, open_store(setting, row), bucket_mb, **more)


def wire_of(row: str) -> str:
    """Return what a row's gradients are on their way: `bf16` for `ddp-bf16:25`."""
    manner = method_of(row).partition("-")[2]
    return manner if manner in CODECS else "fp32"


class Training:
    """A model, its optimizer and a batch: the work of a step."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(0)
        workload = workload_of(setting.model)
        model = workload.build()
        self.model: nn.Module = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # Too slow a rate to fit the batch, whose gradients would end as denormal numbers.
        optim = OptimConfig(base_learning_rate=1e-3)
        self.optimizer = make_optimizer(self.model, optim, setting.batch * setting.ranks)
        for group in self.optimizer.param_groups:
            group["fused"] = True  # torch's fastest, for all rows; Paceline takes it by itself
        torch.manual_seed(1 + setting.rank)
        self._inputs, self._targets = workload.samples(setting.batch, setting.image_size)
        self._dtype = DTYPES[setting.dtype]

    def step(self) -> None:
        """Run the plain recipe."""
        with torch.autocast("cpu", self._dtype, enabled=self._dtype is not torch.float32):
            loss = loss_of(self.model(self._inputs), self._targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> Sequence[Tensor]:
        """Return the parameters."""
        return list(self.model.parameters())


def none(setting: Setting, store: Store, bucket_mb: float) -> Variant:
    """Train alone."""
    training = Training(setting)
    return Variant(step=training.step, finish=nothing, result=training.weights)


def floor(wire: str) -> Callable[[Setting, Store, float], Variant]:
    """Return what makes a variant that trains alone while a wire's bytes are streamed."""

    def make_variant(setting: Setting, store: Store, bucket_mb: float) -> Variant:
        training = Training(setting)
        stream = _stream(setting, store, wire)

        def step() -> None:
            stream.start()
            training.step()
            stream.wait()

        return Variant(step=step, finish=nothing, result=training.weights)

    return make_variant


def line(setting: Setting, store: Store, bucket_mb: float) -> Variant:
    """Stream the bytes and do nothing else."""
    stream = _stream(setting, store, "fp32")

    def step() -> None:
        stream.start()
        stream.wait()

    return Variant(step=step, finish=nothing, result=list)


def ddp(setting: Setting, store: Store, bucket_mb: float) -> Variant:
    """Train by torch's DistributedDataParallel."""
    training = Training(setting)
    training.model = _distributed(training.model, setting, store, bucket_mb)
    return Variant(step=training.step, finish=nothing, result=training.weights)


def ddp_bf16(setting: Setting, store: Store, bucket_mb: float) -> Variant:
    """Train by torch's DistributedDataParallel, with gradients in bfloat16 on their way."""
    training = Training(setting)
    training.model = model = _distributed(training.model, setting, store, bucket_mb)
    model.register_comm_hook(None, lambda _, bucket: _mean_in_bf16(bucket.buffer()))
    return Variant(step=training.step, finish=nothing, result=training.weights)


def paceline(
    sync: str, wire: str = "fp32", update: str = "replicated", steps: int | None = sys.maxsize
) -> Callable[..., Variant]:
    """Return what makes a variant of one of Paceline's methods, in a run of so many steps."""

    def make_variant(
        setting: Setting, store: Store, bucket_mb: float, connections: int = 0
    ) -> Variant:
        training = Training(setting)
        config = SyncConfig(
            sync=sync,  # type: ignore[arg-type]
            wire=wire,  # type: ignore[arg-type]
            update=update,  # type: ignore[arg-type]
            bucket_mb=bucket_mb,
            connections=connections,
        )
        replica = bind(training, setting, store, config, steps)
        numbers = count()

        def step() -> None:
            replica.begin(next(numbers), 1 / setting.ranks)
            training.step()
            replica.end()

        return Variant(step=step, finish=replica.settle, result=training.weights)

    return make_variant


def auto(setting: Setting, store: Store, bucket_mb: float) -> Variant:
    """Let Paceline choose by its trials, and say what."""
    variant = paceline("auto")(setting, store, bucket_mb)
    for _ in range(UNTIMED + TIMED + steps_of_trials(len(CANDIDATES["cpu"]) + 1) + 1):
        variant.step()
    variant.finish()
    return variant


class PrintedNotes(Notes):
    """Notes that are printed where they are made."""

    def show(self, note: str | Message) -> None:
        """Print a note."""
        self.print(note)


def bind(
    training: Training,
    setting: Setting,
    store: Store,
    config: SyncConfig,
    steps: int | None = sys.maxsize,
) -> Replica:
    """Bind the model to the other ranks as `paceline train` does; collective."""
    run = run_of(setting, store)
    run.notes = PrintedNotes()
    trial = TrialSetting(steps=steps)
    return replicate(training.model, training.optimizer, run, config, setting=trial)


PACELINE: dict[str, Callable[..., Variant]] = {
    **{sync: paceline(sync) for sync in SYNCHRONIZERS},
    **{f"notified-{wire}": paceline("notified", wire) for wire in ("bf16", "int8")},
    "notified-sharded": paceline("notified", update="sharded"),
    "auto": auto,
    "default": paceline("auto", steps=None),
}
MAKERS: dict[str, Callable[..., Variant]] = {
    "none": none,
    "floor": floor("fp32"),
    "floor-bf16": floor("bf16"),
    "floor-int8": floor("int8"),
    "line": line,
    "ddp": ddp,
    "ddp-bf16": ddp_bf16,
    **PACELINE,
}


def ring_bytes(model: str, ranks: int, wire: str = "fp32") -> int:
    """Return the bytes that a rank sends, and receives, to add up the gradients in a ring."""
    with torch.device("meta"):
        parameters = workload_of(model).build().parameters()
    numel = sum(p.numel() for p in parameters)
    codec = CODECS[wire]
    size = 4 * numel if codec is None else codec.size(numel)
    return 2 * (ranks - 1) * size // ranks


def _stream(setting: Setting, store: Store, wire: str) -> Stream:
    return Stream(
        store,
        rank=setting.rank,
        ranks=setting.ranks,
        address=setting.address,
        size=ring_bytes(setting.model, setting.ranks, wire),
    )


def _distributed(
    model: nn.Module, setting: Setting, store: Store, bucket_mb: float
) -> DistributedDataParallel:
    join_gloo(setting, store)
    with warnings.catch_warnings():  # 2.13 has a new name for broadcast_buffers, 2.11 hasn't
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model,
            bucket_cap_mb=bucket_mb or 25,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )


def _mean_in_bf16(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """Start to replace a bucket's gradients by their mean."""
    wire = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(wire, async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future()
    return future.then(lambda _: gradients.copy_(wire))


if __name__ == "__main__":
    setting = Setting(**json.loads(sys.argv[1]))
    keep_to_own_cores(setting.rank, setting.ranks)
    serve(setting.rows, partial(make, setting))
