"""Everything that `paceline train` is told, in one frozen value."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace

from paceline.config.data import DataConfig
from paceline.config.model import ModelConfig
from paceline.config.optim import OptimConfig
from paceline.config.run import LegacyConfig, OutputConfig
from paceline.config.world import SyncConfig, WorldConfig

# What may differ between the machines of one run, or between two starts of it.
_OWN = frozenset(
    {
        *("gpus", "num_gpus", "num_workers", "shard_id", "run_id", "output_dir", "cache_dir"),
        *("file_store_path", "redis_host", "redis_port", "redis_url", "master", "secret_file"),
        *("distributed_interfaces", "decode_threads", "first_iter_timeout", "timeout"),
        *("train_data", "test_data"),
        *("resume", "checkpoint_steps", "checkpoint_minutes", "keep_checkpoints"),
        "trace_steps",
    }
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The configuration of a training run."""

    data: DataConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    legacy: LegacyConfig = field(default_factory=LegacyConfig)

    @property
    def global_batch(self) -> int:
        """Images a step on all machines."""
        return self.optim.batch_size * self.world.num_shards

    def flat(self) -> dict[str, object]:
        """Every flag and its value; a password in a URL is left out."""
        values = {name: value for part in asdict(self).values() for name, value in part.items()}
        values["redis_url"] = _without_password(self.world.redis_url)
        return values

    def identity(self) -> dict[str, object]:
        """The flags that make it this run: equal on all its machines and at each of its starts."""
        legacy = asdict(self.legacy)
        return {k: v for k, v in self.flat().items() if k not in _OWN and k not in legacy}

    def digest(self) -> str:
        """Eight hex digits of `identity` and the data's paths."""
        told = {**self.identity(), "data": [self.data.train_data, self.data.test_data]}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]

    def without_weights(self) -> TrainConfig:
        """Return the same configuration without weights to start from: a checkpoint has them."""
        return replace(self, model=replace(self.model, load_model_path=""))

    def with_run_id(self, run_id: str) -> TrainConfig:
        """Return the same configuration under the name `run_id`."""
        return replace(self, world=replace(self.world, run_id=run_id))


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.rpartition("@")[2]
