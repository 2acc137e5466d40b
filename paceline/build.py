"""Makes a run's parts of its configuration: the only file that maps values to classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from paceline.cluster.members import Members
from paceline.comm.communicator import Communicator, broadcast_all
from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.config.data import NO_DATA, DataConfig
from paceline.config.optim import OptimConfig
from paceline.config.train import TrainConfig
from paceline.data.augment import Transform
from paceline.data.leveldb_source import LevelDbSource
from paceline.data.lmdb_source import LmdbSource
from paceline.data.loader import Loader
from paceline.data.order import Order
from paceline.data.source import Source
from paceline.data.synthetic import SyntheticSource
from paceline.errors import ConfigError
from paceline.models.decay import decay_groups
from paceline.models.zoo import build_model, model_factory
from paceline.observe.console import Console
from paceline.observe.csv_log import CsvLog, log_name
from paceline.observe.events import EventFile
from paceline.observe.fanout import Fanout
from paceline.recorder import Recorder
from paceline.schedule import LearningRate, base_rate
from paceline.state.weights import load_weights, save_weights
from paceline.sync.allreduce import AllReduce
from paceline.sync.bucket import partition
from paceline.sync.precision import Precision
from paceline.sync.replica import Replica
from paceline.sync.statistics import RunningStatistics
from paceline.sync.updater import Updater
from paceline.trainer import Trainer

SOURCES: dict[str, Callable[..., Source]] = {"lmdb": LmdbSource, "leveldb": LevelDbSource}
SYNCHRONIZERS = {"allreduce": AllReduce}
MADE_UP_RECORDS = 2048  # of an epoch of made-up images, where --epoch_size is larger


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The records to train on and, where there are any, to test on."""

    train: Source
    test: Source | None

    def close(self) -> None:
        """Close both."""
        self.train.close()
        if self.test is not None:
            self.test.close()


def check(config: TrainConfig, gpus: int) -> list[str]:
    """Check what can be known before anything is written, on a machine with `gpus` GPUs.

    Returns:
        what a person should know, in sentences.

    Raises:
        ConfigError: a path, a label, a model, a number of samples or of GPUs.
        DataError: not a database, or one of unknown records.
    """
    world = config.world
    wanted = max(world.gpu_numbers, default=world.workers - 1)
    if gpus and not world.use_cpu and wanted >= gpus:
        raise ConfigError(
            f"GPU {wanted} isn't there: this machine has {gpus}, numbered from 0; name fewer by "
            "--gpus or --num_gpus, or compute on CPUs by --use_cpu."
        )
    if config.model.load_model_path and not Path(config.model.load_model_path).is_file():
        raise ConfigError(
            f"--load_model_path {config.model.load_model_path}: there is no such file."
        )
    channels = config.data.num_channels
    model_factory(config.model.name, num_labels=config.data.num_labels, num_channels=channels)
    sources = open_sources(config)
    sources.close()
    return list(_notes(config, sources))


def _notes(config: TrainConfig, sources: Sources) -> Iterator[str]:
    for source in (sources.train, sources.test):
        if source is not None and source.index_note:
            yield source.index_note
    labels = sources.train.labels
    wanted = config.data.num_labels
    if labels is not None and (classes := labels.max() + 1) < wanted:
        yield (
            f"the training data has {classes} classes, and the model is made for {wanted}: "
            f"--num_labels {classes} fits."
        )


def build_recorder(
    config: TrainConfig, members: Members, folder: Path
) -> tuple[Recorder, Path | None]:
    """Make a rank's recorders, and tell where the CSV log is: rank 0 writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    events = EventFile(folder, members.rank)
    if members.rank > 0:
        return events, None
    optim = config.optim
    rate = base_rate(optim.base_learning_rate, config.global_batch, scale=optim.scale_lr)
    log = CsvLog(
        folder,
        name=log_name(
            config.model.short_name,
            members.local_world_size,
            optim.batch_size,
            config.data.num_labels,
            rate,
        ),
        parameters=config.flat(),
        now=datetime.now(),
    )
    return Fanout(events, log, Console()), log.path


def open_sources(config: TrainConfig) -> Sources:
    """Open the databases and check what can be known of them at once.

    Raises:
        ConfigError: a path, a label beyond `num_labels`, other classes in the test data, or fewer
            samples than workers.
        DataError: not a database, or one of unknown records.
    """
    data, seed = config.data, config.optim.seed
    train = _open_source("train_data", data.train_data, data, seed)
    if min(len(train), data.epoch_size) < config.world.workers:
        raise ConfigError(
            f"--train_data {data.train_data}: {min(len(train), data.epoch_size)} samples for "
            f"{config.world.workers} workers; give each worker at least one."
        )
    if not data.test_data:
        return Sources(train=train, test=None)
    test = _open_source("test_data", data.test_data, data, seed + 1)
    names = train.label_names, test.label_names
    if None not in names and names[0] != names[1]:
        raise ConfigError(
            f"--test_data {data.test_data}: its classes {_some(names[1])} aren't those of the "
            f"training data, {_some(names[0])}; make both of folders with the same classes."
        )
    return Sources(train=train, test=test)


def _some(names: tuple[str, ...] | None) -> str:
    """Name the first few of a list."""
    assert names is not None
    return ", ".join(names[:5]) + (f", … ({len(names)})" if len(names) > 5 else "")


def device_of(config: TrainConfig, local_rank: int) -> torch.device:
    """Return the device of a machine's worker."""
    if config.world.use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = config.world.gpu_numbers or tuple(range(config.world.workers))
    return torch.device("cuda", gpus[local_rank])


def connect(
    config: TrainConfig, members: Members, store: Store, device: torch.device
) -> Communicator:
    """Connect this worker with all others of its generation; collective.

    Raises:
        CommError: a rank didn't come in time.
    """
    return ProcessGroupCommunicator(
        PrefixStore(f"generation/{members.generation}", store),
        rank=members.rank,
        world_size=members.world_size,
        device=device,
        address=members.address,
        first_timeout=config.world.first_iter_timeout,
        timeout=config.world.timeout,
    )


def build_trainer(
    config: TrainConfig,
    members: Members,
    communicator: Communicator,
    sources: Sources,
    device: torch.device,
    recorder: Recorder,
    folder: Path,
) -> Trainer:
    """Make the model and everything around it; collective, as rank 0's weights are sent to all.

    Raises:
        ConfigError: model or weights can't be had as asked for.
    """
    optim = config.optim
    torch.manual_seed(optim.seed)
    model = make_model(config, device)
    make_loader = partial(_loader, config, members, device)
    train = make_loader(sources.train, train=True)
    test = make_loader(sources.test, train=False) if sources.test is not None else None
    optimizer = make_optimizer(model, optim, config.global_batch)
    factor = LearningRate(
        policy=optim.lr_policy,
        steps_per_epoch=train.steps,
        epochs=optim.num_epochs,
        warmup_epochs=optim.warmup_epochs,
    )
    replica = replicate(model, optimizer, communicator, config.sync.sync, config.sync.bucket_mb)
    weights = folder / f"{config.model.weights_name}.pt"
    return Trainer(
        model=model,
        criterion=nn.CrossEntropyLoss(label_smoothing=optim.label_smoothing),
        optimizer=optimizer,
        schedule=LambdaLR(optimizer, factor),
        precision=Precision(config.model.dtype, device),
        replica=replica,
        communicator=communicator,
        device=device,
        train=train,
        test=test,
        recorder=recorder,
        save=partial(save_weights, weights, model) if members.rank == 0 else _nothing,
        epochs=optim.num_epochs,
        generation=members.generation,
    )


def make_model(config: TrainConfig, device: torch.device) -> nn.Module:
    """Make the model on its device, from torch's random seed or from given weights."""
    data = config.data
    model = build_model(
        config.model.name, num_labels=data.num_labels, num_channels=data.num_channels
    )
    if config.model.load_model_path:
        load_weights(Path(config.model.load_model_path), model)
    layout = torch.channels_last if config.model.channels_last else torch.contiguous_format
    return model.to(device=device, memory_format=layout)  # type: ignore[call-overload, no-any-return]


def make_optimizer(model: nn.Module, optim: OptimConfig, global_batch: int) -> Optimizer:
    """Make SGD with Nesterov momentum, with weight decay where it belongs."""
    return SGD(
        decay_groups(model, optim.weight_decay, norm_scale=not optim.no_bn_decay),
        lr=base_rate(optim.base_learning_rate, global_batch, scale=optim.scale_lr),
        momentum=optim.momentum,
        nesterov=optim.momentum > 0,
    )


def replicate(
    model: nn.Module,
    optimizer: Optimizer,
    communicator: Communicator,
    sync: str,
    bucket_mb: float,
) -> Replica:
    """Give all ranks rank 0's model and bind it to a synchronizer; collective."""
    tensors = [*model.parameters(), *model.buffers()]
    broadcast_all(communicator, tensors, "the broadcast of rank 0's weights")
    groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    buckets = partition(model.parameters(), groups, round(bucket_mb * 2**20))
    synchronizer = SYNCHRONIZERS[sync](
        buckets, communicator, Updater(optimizer, buckets), RunningStatistics(model)
    )
    return Replica(model, optimizer, synchronizer)


def _open_source(flag: str, path: str, data: DataConfig, seed: int) -> Source:
    if path == NO_DATA:
        size = data.epoch_size if flag == "train_data" else data.test_epoch_size
        return SyntheticSource(
            records=min(size, MADE_UP_RECORDS),
            image_size=data.image_size,
            channels=data.num_channels,
            num_labels=data.num_labels,
            seed=seed,
        )
    if not Path(path).exists():
        raise ConfigError(f"--{flag} {path}: there is no such database.")
    cache = Path(data.cache_dir) if data.cache_dir else None
    source = SOURCES[data.db_type](Path(path), cache_dir=cache)
    if source.labels is not None and source.labels.max() >= data.num_labels:
        source.close()
        raise ConfigError(
            f"--num_labels {data.num_labels}: {path} has labels up to {source.labels.max()}; "
            f"give at least {source.labels.max() + 1}."
        )
    return source


def _loader(
    config: TrainConfig, members: Members, device: torch.device, source: Source, *, train: bool
) -> Loader:
    data, seed = config.data, config.optim.seed
    order = Order(
        size=len(source),
        batch_size=config.global_batch,
        seed=seed,
        epoch_size=data.epoch_size if train else data.test_epoch_size,
        shuffle=train,
    )
    if train and order.samples < members.world_size:
        raise ConfigError(
            f"--train_data {data.train_data}: {order.samples} samples for {members.world_size} "
            "workers; give each at least one."
        )
    transform = Transform(
        augment=data.augment,
        image_size=data.image_size,
        scale=data.scale,
        channels=data.num_channels,
        color_jitter=data.color_jitter if train else 0.0,
        seed=seed,
        train=train,
    )
    return Loader(
        source,
        order,
        transform,
        mean=data.mean,
        std=data.std,
        rank=members.rank,
        world_size=members.world_size,
        device=device,
        threads=data.decode_threads or cores_per_worker(members.local_world_size),
        num_labels=data.num_labels,
        channels_last=config.model.channels_last,
    )


def cores_per_worker(local_world_size: int) -> int:
    """Return this machine's cores, those this process may use, shared among its workers."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def _nothing() -> None:
    """Save nothing: rank 0 does."""
