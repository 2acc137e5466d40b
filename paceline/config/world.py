"""Who takes part in a run, where they meet, and how they exchange gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.rules import at_least, file_name, positive, within
from paceline.errors import ConfigError, Message


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """Workers of this machine, machines of the run, and their meeting place."""

    gpus: str = ""
    """GPUs of this machine to use, separated by commas: "0,1"."""

    num_gpus: int = 0
    """Number of GPUs to use, where --gpus isn't given; 0 is one. On a machine without GPUs it is
    the number of CPU workers."""

    num_workers: int = 0
    """Workers of this machine, where neither --gpus nor --num_gpus is given; 0 is one. `paceline
    launch` also takes it as -n."""

    use_cpu: bool = False
    """Compute on CPUs even where there are GPUs."""

    num_shards: int = 1
    """Machines in the run."""

    shard_id: int = 0
    """This machine's number, 0 to num_shards - 1."""

    run_id: str = ""
    """The run's name, the same on all machines; needed with several. Its folder is
    <output_dir>/<run_id>."""

    file_store_path: str = ""
    """Meet in this folder, which all machines share."""

    redis_host: str = ""
    """Meet on this Redis server."""

    redis_port: int = 6379
    """Port of the Redis server."""

    redis_url: str = ""
    """Meet on this Redis server, with password and TLS: rediss://:PASSWORD@HOST:PORT/0."""

    master: str = ""
    """Meet on machine 0, at HOST:PORT."""

    secret_file: str = ""
    """File with a secret that all machines share, without which no process can join or read the
    run's entries in the store; the environment variable PACELINE_SECRET gives one, too."""

    first_iter_timeout: float = 1200.0
    """Seconds to wait for all machines, and for the first step."""

    timeout: float = 60.0
    """Seconds to wait for another worker in any later step."""

    distributed_interfaces: str = ""
    """Network interfaces to use, separated by commas; by default those that reach the peers."""

    def __post_init__(self) -> None:
        at_least("num_shards", self.num_shards, 1)
        if not 0 <= self.shard_id < self.num_shards:
            raise ConfigError(
                f"--shard_id {self.shard_id}: must be 0 to {self.num_shards - 1} with "
                f"--num_shards {self.num_shards}."
            )
        for flag in ("num_workers", "num_gpus"):
            at_least(flag, getattr(self, flag), 0)
        within("redis_port", self.redis_port, 1, 65536)
        positive("timeout", self.timeout)
        positive("first_iter_timeout", self.first_iter_timeout)
        self._check_one_way_to_say_it()
        self._check_meeting_place()
        self.gpu_numbers  # noqa: B018 - raises where the list can't be read

    def _check_one_way_to_say_it(self) -> None:
        gpus = f"--gpus {self.gpus}" if self.gpus else f"--num_gpus {self.num_gpus}"
        given = [gpus, f"--num_workers {self.num_workers}"]
        if (self.gpus or self.num_gpus) and self.num_workers:  # of the first two, --gpus counts
            raise ConfigError(f"{' and '.join(given)} say the same thing: give one of them.")

    def _check_meeting_place(self) -> None:
        places = [
            f"--{flag}"
            for flag in ("file_store_path", "redis_host", "redis_url", "master")
            if getattr(self, flag)
        ]
        if len(places) > 1:
            raise ConfigError(f"{' and '.join(places)} are different meeting places: give one.")
        if self.num_shards > 1 and not places:
            raise ConfigError(
                f"--num_shards {self.num_shards} needs a meeting place: give --file_store_path, "
                "--redis_host, --redis_url or --master."
            )
        if self.num_shards > 1 and not self.run_id:
            raise ConfigError(
                f"--num_shards {self.num_shards} needs --run_id, the same on all machines."
            )
        if self.run_id:
            file_name("run_id", self.run_id)

    @property
    def gpu_numbers(self) -> tuple[int, ...]:
        """The numbers in `--gpus`.

        Raises:
            ConfigError: they aren't different whole numbers.
        """
        words = [word.strip() for word in self.gpus.split(",") if word.strip()]
        numbers = tuple(int(word) for word in words if word.isdecimal())
        if len(set(numbers)) < len(words):
            raise ConfigError(f"--gpus {self.gpus}: give different numbers, such as 0,1.")
        return numbers

    @property
    def workers(self) -> int:
        """The number of workers of this machine."""
        return len(self.gpu_numbers) or self.num_gpus or self.num_workers or 1


_BUCKET_MB = {"allreduce": 8, "notified": 16}


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """The exchange of gradients."""

    sync: Literal["auto", "allreduce", "notified"] = "auto"
    """The method: allreduce (NCCL on GPUs, Gloo on CPUs), or notified (one-sided puts: shared
    memory inside a machine, TCP between machines; no barrier in a step). auto tries both, with
    several sizes of a bucket, in the first steps of the training, says what it chose and why, and
    goes on with that; a resumed run does, too."""

    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    """What float32 gradients are on their way between machines, with notified: fp32, as they are;
    bf16, half of the bytes; int8, a quarter. What a step's rounding misses goes with the next."""

    update: Literal["replicated", "sharded"] = "replicated"
    """Who updates a parameter: every worker its copy (replicated), or, with notified, the one that
    adds up its gradients (sharded): each has a share of the optimizer's state."""

    transport: Literal["tcp", "nixl"] = "tcp"
    """How puts travel, with notified: tcp, with shared memory inside a machine, or nixl, by
    NVIDIA's library for RDMA (pip install 'paceline[nixl]'), also inside a machine."""

    connections: int = 0
    """TCP connections to each worker of another machine, with notified: several where one doesn't
    fill the link, over long or lossy ways; 0 is one, or what auto chooses."""

    bucket_mb: float = 0.0
    """Size of a bucket, the unit of communication, in MiB; 0 is the method's own, 8 with
    allreduce and 16 with notified, or what auto chooses."""

    def __post_init__(self) -> None:
        at_least("bucket_mb", self.bucket_mb, 0)
        within("connections", self.connections, 0, 33)
        if self.sync == "allreduce" and self.asks_for_puts:
            self._refuse_collectives()
        if self.transport == "nixl" and self.connections > 1:
            raise ConfigError(
                Message(
                    "{--connections} {} needs {--transport} tcp: NIXL makes its own connections.",
                    self.connections,
                )
            )

    def _refuse_collectives(self) -> None:
        if self.wire != "fp32" and self.sync == "allreduce":
            raise ConfigError(
                Message(
                    "{--wire} {} needs {--sync} notified: allreduce sends gradients as they are.",
                    self.wire,
                )
            )
        if self.update != "replicated" and self.sync == "allreduce":
            raise ConfigError(
                Message(
                    "{--update} {} needs {--sync} notified: with allreduce every worker updates "
                    "its copy.",
                    self.update,
                )
            )
        flag = "transport" if self.transport == "nixl" else "connections"
        raise ConfigError(
            Message(
                f"{{--{flag}}} {{}} needs {{--sync}} notified: allreduce makes its own "
                "connections, by Gloo or NCCL.",
                getattr(self, flag),
            )
        )

    @property
    def asks_for_puts(self) -> bool:
        """Whether something is asked for that only puts have."""
        plain = (self.wire, self.update, self.transport) == ("fp32", "replicated", "tcp")
        return not plain or self.connections > 1

    @property
    def idle_on_one_machine(self) -> list[Message]:
        """A sentence for each flag that changes nothing where all workers share memory."""
        flags = {"wire": self.wire != "fp32", "connections": self.connections > 1}
        return [
            Message(
                f"{{--{flag}}} {{}} changes nothing on one machine, whose workers share memory: it "
                "is for what travels between machines.",
                getattr(self, flag),
            )
            for flag, given in flags.items()
            if given and self.transport != "nixl"  # which shares none
        ]

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket of the method, which is none to be chosen yet."""
        return round((self.bucket_mb or _BUCKET_MB[self.sync]) * 2**20)
