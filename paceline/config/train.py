"""Configuration of `paceline train` in one frozen value, and what makes two of them one run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any

from paceline.config.average import AverageConfig
from paceline.config.data import NO_DATA, DataConfig
from paceline.config.model import ModelConfig
from paceline.config.optim import OptimConfig
from paceline.config.pipeline import PipelineConfig
from paceline.config.run import LegacyConfig, OutputConfig
from paceline.config.world import SyncConfig, WorldConfig, without_password

# Flags that may differ between the machines of one run, or between two starts of it.
_OWN = frozenset(
    {
        *("gpus", "num_gpus", "num_workers", "shard_id", "run_id", "output_dir", "cache_dir"),
        *("file_store_path", "redis_host", "redis_port", "redis_url", "etcd"),
        *("master", "secret_file", "peer_timeout", "first_iter_timeout", "timeout"),
        *("idle_timeout", "distributed_interfaces", "decode_threads", "decode_workers"),
        *("train_data", "test_data", "config", "resume", "reset_optimizer"),
        *("checkpoint_steps", "checkpoint_minutes", "keep_checkpoints"),
        *("snapshots", "snapshot_memory_mb", "snapshot_copies", "replica_check"),
        *("trace_steps", "tracker", "price_per_hour"),
        *("max_loss_at", "shares", "average_through", "average_server"),
        *("num_servers", "parameter_servers"),
    }
)

# Those of them that decide, with the identity, what a run trains, and by how many workers.
_STARTED = (
    *("train_data", "test_data", "gpus", "num_gpus", "num_workers"),
    *("max_loss_at", "shares", "average_through", "average_server"),
    *("num_servers", "parameter_servers", "price_per_hour"),
)

# Hyperparameters that a later start of a run may edit: from then on, they hold.
_EDITABLE = frozenset(
    {
        *("base_learning_rate", "scale_lr", "lr_policy", "warmup_epochs"),
        *("optimizer", "optimizer_options"),
        *("momentum", "weight_decay", "label_smoothing", "clip_norm", "clip_value", "max_loss"),
        *("param_dtype", "target_accuracy", "patience"),
    }
)

_ENDING = ("num_epochs", "target_accuracy", "patience")
"""Flags that decide where a run ends, its epochs first: with others, a finished run continues."""

# Flags of which the first default run ids were digests, whatever their values. Never changes.
_FIRST_DIGESTED = frozenset(
    {
        *("num_channels", "image_size", "num_labels", "epoch_size", "test_epoch_size", "db_type"),
        *("image_mean_per_channel", "image_std_per_channel", "augment", "scale", "color_jitter"),
        *("bad_records", "model", "num_layers", "dtype", "channels_last", "force_bfloat16"),
        *("sync_bn", "compile", "load_model_path", "save_model_name", "batch_size", "num_epochs"),
        *("base_learning_rate", "weight_decay", "momentum", "lr_policy", "warmup_epochs"),
        *("scale_lr", "label_smoothing", "no_bn_decay", "clip_norm", "clip_value", "max_loss"),
        *("seed", "use_cpu", "num_shards", "sync", "wire", "update", "transport", "connections"),
        "bucket_mb",
    }
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The configuration of a training run."""

    data: DataConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    average: AverageConfig = field(default_factory=AverageConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    legacy: LegacyConfig = field(default_factory=LegacyConfig)

    @property
    def global_batch(self) -> int:
        """Images a step on all machines."""
        return self.optim.batch_size * self.world.num_shards

    def flat(self) -> dict[str, object]:
        """Every flag and its value; a password in a URL is left out."""
        values = {name: value for part in asdict(self).values() for name, value in part.items()}
        values |= {name: without_password(str(values[name])) for name in ("redis_url", "etcd")}
        return values

    def identity(self) -> dict[str, object]:
        """The flags that make it this run: equal on all its machines and at each of its starts."""
        legacy = asdict(self.legacy)
        return {k: v for k, v in self.flat().items() if k not in _OWN and k not in legacy}

    def started(self) -> dict[str, object]:
        """The further flags that another start needs to train the same: data and workers."""
        flat = self.flat()
        return {name: flat[name] for name in _STARTED}

    def digests(self) -> tuple[str, ...]:
        """Eight hex digits for the default run id, and the older ones that it may still have.

        They are a digest of the data's paths and of the flags that differ from their defaults, so
        that a new flag changes no run's id. Older ids are digests of all flags of their time.
        """
        values = self.identity()
        given = {name: value for name, value in values.items() if value != _defaults()[name]}
        first = {name: value for name, value in values.items() if name in _FIRST_DIGESTED}
        older = (self._digest(first),) if given.keys() <= _FIRST_DIGESTED else ()
        # A run that a bad record has stopped continues with --bad_records skip.
        stopped = {name: value for name, value in given.items() if name != "bad_records"}
        before = (self._digest(stopped),) if stopped != given else ()
        return self._digest(given), *older, *before

    def _digest(self, flags: Mapping[str, object]) -> str:
        identity = {**flags, "data": [self.data.train_data, self.data.test_data]}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]

    def with_run_id(self, run_id: str) -> TrainConfig:
        """Return the same configuration under the name `run_id`."""
        return replace(self, world=replace(self.world, run_id=run_id))


def config_of(flags: Mapping[str, object]) -> TrainConfig:
    """Return the configuration of a run, given its flags as they were saved.

    The data's paths aren't saved: the configuration is that of synthetic images. Flags that the run
    didn't know yet have their defaults.

    Raises:
        ConfigError: a value breaks a rule.
    """
    kinds = {"data": DataConfig, "model": ModelConfig, "optim": OptimConfig, "world": WorldConfig}
    parts: dict[str, Any] = {}
    for name, kind in kinds.items():
        known = {one.name for one in fields(kind)} - _OWN
        values = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in flags.items()
            if key in known
        }
        parts[name] = kind(**(values | ({"train_data": NO_DATA} if name == "data" else {})))
    return TrainConfig(**parts)


def difference(known: Mapping[str, object], wanted: Mapping[str, object]) -> str:
    """Return the first flag that makes a run another one, "" where it is the same.

    A flag that one of the two lacks has its default: the run began before the flag existed. More
    epochs than before continue the same run, and so do edited hyperparameters. So does a run that
    skips bad records from now on: the records before the first bad one are trained alike.

    Args:
        known: identity of a run, as it was saved.
        wanted: identity of the run that is asked for.
    """
    for name, before, now in _changes(known, wanted):
        more = name == "num_epochs" and before is not None and now is not None and before <= now
        skips = name == "bad_records" and (before, now) == ("stop", "skip")
        if not (more or skips or name in _EDITABLE):
            return name
    return ""


def edits(known: Mapping[str, object], wanted: Mapping[str, object]) -> dict[str, object]:
    """Return the hyperparameters that a start edits, and the values that it is given.

    Args:
        known: identity of a run, as it was saved.
        wanted: identity of the same run, as it is asked for now.
    """
    changes = _changes(known, wanted)
    return {name: now for name, _, now in changes if name in _EDITABLE}


def continues(known: Mapping[str, object], wanted: Mapping[str, object], *, complete: bool) -> bool:
    """Return whether a finished run continues with other flags, which end it elsewhere.

    Args:
        known: identity of the run, as it was saved.
        wanted: identity of the same run, as it is asked for now.
        complete: all its epochs were trained, so that only more of them continue it.
    """
    ending = _ENDING[:1] if complete else _ENDING
    return any(name in ending for name, _, _ in _changes(known, wanted))


def _changes(
    known: Mapping[str, object], wanted: Mapping[str, object]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each flag that differs, with both values."""
    trains = "num_epochs" in known and "num_epochs" in wanted  # not so a run of a script
    for name in {**wanted, **known}:
        if trains and name in _OWN:
            continue
        default = _defaults().get(name) if trains else None
        before = _plain(known.get(name, default))
        now = _plain(wanted.get(name, default))
        if before != now:
            yield name, before, now


def _plain(value: Any) -> Any:
    """Return a value as TOML and JSON know it."""
    return list(value) if isinstance(value, tuple) else value


@cache
def _defaults() -> Mapping[str, object]:
    return TrainConfig(data=DataConfig(train_data="")).identity()
