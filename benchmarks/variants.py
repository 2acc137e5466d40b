"""A training step in several ways, which differ in the exchange and in nothing else.

    none        no exchange: each rank trains alone
    floor       no exchange, but two plain threads a rank stream as many bytes both ways
    ddp:MB      torch's DistributedDataParallel with that `bucket_cap_mb`
    allreduce   Paceline's, with its own bucket size; allreduce:MB with another
    notified    Paceline's on windows: shared memory on one machine, TCP between two
    line        no training: the floor's stream alone

Model, layout, optimizer, loss and images are the same. The *floor* moves the bytes that a ring's
all_reduce moves per rank, 2 (N - 1) / N of the gradients' each way; the stream starts with the
forward, and a step ends when both its arithmetic and its stream are done: that is the ideal
max(Tf + Tb, Tc), in which communication hides under the backward and the next forward alike, as
measured on cores that must also move the bytes.

DDP has its fastest settings: `gradient_as_bucket_view` (gradients are not copied back) and no
broadcast of buffers before each forward (Paceline averages them in every step).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from stream import LIMIT, Stream
from torch import nn
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.nn.parallel import DistributedDataParallel

from paceline.build import Peers, make_optimizer, replicate
from paceline.build.exchange import SYNCHRONIZERS
from paceline.cluster.members import Members
from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.config.optim import OptimConfig
from paceline.config.world import SyncConfig
from paceline.models.zoo import build_model
from paceline.sync.precision import DTYPES
from paceline.sync.replica import Replica

CLASSES = 1000


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a rank is told: its place, where it meets the others, and the work.

    `store` is a file that all ranks see, `address` the one that reaches this rank, `company` says
    how many ranks there are at each address.
    """

    rank: int
    ranks: int
    address: str
    company: dict[str, int]
    store: str
    rows: list[str]
    model: str
    image_size: int
    batch: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a step.

    Attributes:
        step: runs one.
        finish: installs what the last one left under way.
        model: what is trained; None where nothing is.
    """

    step: Callable[[], None]
    finish: Callable[[], None]
    model: nn.Module | None


def make(setting: Setting, row: str) -> Variant:
    """Make the variant that a row such as `ddp:25` names; collective."""
    method, _, bucket_mb = row.partition(":")
    return MAKERS[method](setting, meet(setting, row), float(bucket_mb or 0))


def meet(setting: Setting, name: str) -> Store:
    """Return where all ranks find each other for the purpose `name`."""
    store = PrefixStore(name, FileStore(setting.store, -1))
    store.set_timeout(timedelta(seconds=LIMIT))
    return store


class Training:
    """A model, its optimizer and a batch: the work of a step."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(0)
        model = build_model(setting.model, num_labels=CLASSES, num_channels=3)
        self.model: nn.Module = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # Too slow a rate to fit the batch, whose gradients would end as denormal numbers.
        optim = OptimConfig(base_learning_rate=1e-3)
        self.optimizer = make_optimizer(self.model, optim, setting.batch * setting.ranks)
        for group in self.optimizer.param_groups:
            group["fused"] = True  # torch's fastest, for all rows; Paceline takes it by itself
        torch.manual_seed(1 + setting.rank)
        size = (setting.batch, 3, setting.image_size, setting.image_size)
        self._images = torch.randn(size).contiguous(memory_format=torch.channels_last)
        self._labels = torch.randint(CLASSES, (setting.batch,))
        self._criterion = nn.CrossEntropyLoss()
        self._dtype = DTYPES[setting.dtype]

    def step(self) -> None:
        """Run the plain recipe."""
        with torch.autocast("cpu", self._dtype, enabled=self._dtype is not torch.float32):
            loss = self._criterion(self.model(self._images), self._labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def none(setting: Setting, store: Store, bucket_mb: float) -> Variant:
    """Train alone."""
    training = Training(setting)
    return Variant(step=training.step, finish=_nothing, model=training.model)


def floor(setting: Setting, store: Store, bucket_mb: float) -> Variant:
    """Train alone while as many bytes are streamed."""
    training = Training(setting)
    stream = _stream(setting, store)

    def step() -> None:
        stream.start()
        training.step()
        stream.wait()

    return Variant(step=step, finish=_nothing, model=training.model)


def line(setting: Setting, store: Store, bucket_mb: float) -> Variant:
    """Stream the bytes and do nothing else."""
    stream = _stream(setting, store)

    def step() -> None:
        stream.start()
        stream.wait()

    return Variant(step=step, finish=_nothing, model=None)


def ddp(setting: Setting, store: Store, bucket_mb: float) -> Variant:
    """Train by torch's DistributedDataParallel."""
    training = Training(setting)
    if not dist.is_initialized():
        limit = timedelta(seconds=LIMIT)
        place = {"rank": setting.rank, "world_size": setting.ranks}
        dist.init_process_group("gloo", store=store, timeout=limit, **place)  # type: ignore[arg-type]
    with warnings.catch_warnings():  # 2.13 has a new name for broadcast_buffers, 2.11 hasn't
        warnings.simplefilter("ignore", FutureWarning)
        training.model = DistributedDataParallel(
            training.model,
            bucket_cap_mb=bucket_mb or 25,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )
    return Variant(step=training.step, finish=_nothing, model=training.model)


def paceline(sync: str, wire: str = "fp32") -> Callable[[Setting, Store, float], Variant]:
    """Return what makes a variant of one of Paceline's methods."""

    def make_variant(setting: Setting, store: Store, bucket_mb: float) -> Variant:
        training = Training(setting)
        config = SyncConfig(sync=sync, wire=wire, bucket_mb=bucket_mb)  # type: ignore[arg-type]
        replica = bind(training, setting, store, config)
        numbers = count()

        def step() -> None:
            with replica.step(next(numbers), 1 / setting.ranks):
                training.step()

        return Variant(step=step, finish=replica.settle, model=training.model)

    return make_variant


def bind(training: Training, setting: Setting, store: Store, config: SyncConfig) -> Replica:
    """Bind the model to the other ranks as `paceline train` does; collective."""
    communicator = ProcessGroupCommunicator(
        store,
        rank=setting.rank,
        world_size=setting.ranks,
        device=torch.device("cpu"),
        address=setting.address,
        first_timeout=LIMIT,
        timeout=LIMIT,
    )
    addresses = tuple(setting.company)
    machine = addresses.index(setting.address)
    before = sum(setting.company[address] for address in addresses[:machine])
    members = Members.on(
        machine,
        setting.rank - before,
        machines=tuple(setting.company.values()),
        addresses=addresses,
        hosts=addresses,
    )
    peers = Peers(
        members=members,
        store=store,
        token="benchmark",
        limits=(LIMIT, LIMIT),
        communicator=communicator,
    )
    return replicate(training.model, training.optimizer, peers, config)


MAKERS: dict[str, Callable[[Setting, Store, float], Variant]] = {
    "none": none,
    "floor": floor,
    "line": line,
    "ddp": ddp,
    **{sync: paceline(sync) for sync in SYNCHRONIZERS},
    **{f"notified-{wire}": paceline("notified", wire) for wire in ("bf16", "int8")},
}


def ring_bytes(model: str, ranks: int) -> int:
    """Return the bytes that a rank sends, and receives, to add up the gradients in a ring."""
    with torch.device("meta"):
        parameters = build_model(model, num_labels=CLASSES, num_channels=3).parameters()
    return 2 * (ranks - 1) * sum(p.numel() * p.element_size() for p in parameters) // ranks


def _stream(setting: Setting, store: Store) -> Stream:
    return Stream(
        store,
        rank=setting.rank,
        ranks=setting.ranks,
        address=setting.address,
        size=ring_bytes(setting.model, setting.ranks),
    )


def _nothing() -> None:
    """Leave everything as it is: nothing is left to install."""
