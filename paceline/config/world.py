"""Configuration of the world, the rendezvous and the exchange of gradients."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from paceline.config.rules import at_least, file_name, positive, silence, within
from paceline.errors import ConfigError, Message


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """Workers, machines and rendezvous."""

    gpus: str = ""
    """GPUs of this machine to use, separated by commas: "0,1". A GPU that is repeated, "0,0", has
    several workers; with --sync notified, average or auto."""

    num_gpus: int = 0
    """Number of GPUs to use if --gpus is not given, one worker per GPU. On a machine without GPUs,
    this is the number of CPU workers. 0: --num_workers sets the number."""

    num_workers: int = 0
    """Number of workers on this machine if neither --gpus nor --num_gpus is given. 0 means one
    worker in `paceline train`, and one worker per GPU in `paceline launch`. `paceline launch` also
    accepts -n for this flag."""

    use_cpu: bool = False
    """Use CPUs even if GPUs are available."""

    num_shards: int = 1
    """Number of machines in the run."""

    shard_id: int = 0
    """This machine's number, 0 to num_shards - 1."""

    run_id: str = ""
    """Name of the run, the same on all machines; required for several machines. The run's folder is
    <output_dir>/<run_id>."""

    file_store_path: str = ""
    """Rendezvous through this folder, which all machines share. Ignored if Redis is used."""

    redis_host: str = ""
    """Rendezvous through this Redis server."""

    redis_port: int = 6379
    """Port of the Redis server."""

    redis_url: str = ""
    """URL of the Redis server for rendezvous, with password and TLS: rediss://:PASSWORD@HOST:PORT/0."""

    etcd: str = ""
    """Rendezvous through this etcd cluster: HOST:PORT, or several endpoints with commas between,
    with user, password and TLS: https://USER:PASSWORD@HOST:PORT,HOST:PORT?cacert=FILE&cert=FILE&key=FILE
    (pip install 'paceline[etcd]')."""

    master: str = ""
    """Rendezvous at machine 0, HOST:PORT."""

    secret_file: str = ""
    """File with a secret that all machines share. A process without the secret can neither join the
    run nor read the run's entries in the store. The environment variable
    PACELINE_SECRET is an alternative."""

    first_iter_timeout: float = 1200.0
    """Timeout in seconds until all machines have joined; also the timeout of each wait for another
    worker in the first step."""

    timeout: float = 60.0
    """Seconds to wait for another worker in any step after the first."""

    idle_timeout: float = 1800.0
    """Seconds for which a worker may work outside a step, such as in an evaluation of its own,
    while others wait for it; then the run ends. Until then such a worker doesn't count as lost."""

    peer_timeout: float = 10.0
    """Seconds without a sign of life after which another worker counts as lost."""

    distributed_interfaces: str = ""
    """Network interfaces to use, comma-separated (default: those that reach the peers)."""

    def __post_init__(self) -> None:
        at_least(self, 1, "num_shards")
        if not 0 <= self.shard_id < self.num_shards:
            raise ConfigError(
                f"--shard_id {self.shard_id}: must be 0 to {self.num_shards - 1} with "
                f"--num_shards {self.num_shards}."
            )
        at_least(self, 0, "num_workers", "num_gpus")
        within("redis_port", self.redis_port, 1, 65536)
        positive("timeout", self.timeout)
        positive("idle_timeout", self.idle_timeout)
        silence("peer_timeout", self.peer_timeout)
        positive("first_iter_timeout", self.first_iter_timeout)
        if (self.gpus or self.num_gpus) and self.num_workers:  # of the first two, --gpus counts
            gpus = f"--gpus {self.gpus}" if self.gpus else f"--num_gpus {self.num_gpus}"
            raise ConfigError(
                f"{gpus} and --num_workers {self.num_workers} are redundant: use one of them."
            )
        self._check_rendezvous()
        self.gpu_numbers  # noqa: B018 - raises where the list can't be read

    def _check_rendezvous(self) -> None:
        flags = [f for f in ("redis_host", "redis_url", "etcd", "master") if getattr(self, f)]
        if self.file_store_path and flags not in (["redis_host"], ["redis_url"]):
            flags.insert(0, "file_store_path")  # beside Redis it is Caffe2's folder of saved models
        if len(flags) > 1:
            names = " and ".join(f"--{flag}" for flag in flags)
            raise ConfigError(f"{names} select different rendezvous methods: use one.")
        if self.num_shards > 1 and not flags:
            raise ConfigError(
                f"--num_shards {self.num_shards} needs a rendezvous: use --file_store_path, "
                "--redis_host, --redis_url, --etcd or --master."
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

        One that is repeated has several workers, which share it.

        Raises:
            ConfigError: they aren't whole numbers.
        """
        words = [word.strip() for word in self.gpus.split(",") if word.strip()]
        numbers = tuple(int(word) for word in words if word.isdecimal())
        if len(numbers) < len(words):
            raise ConfigError(
                f"--gpus {self.gpus}: GPU numbers must be whole numbers, such as 0,1."
            )
        return numbers

    @property
    def workers(self) -> int:
        """The number of workers of this machine."""
        return len(self.gpu_numbers) or self.num_gpus or self.num_workers or 1


def without_password(url: str) -> str:
    """Return a URL, or an address without a scheme, without its user and password."""
    return re.sub(r"^(\w+://)?.*@", r"\1", url, flags=re.DOTALL)


METHODS: Mapping[str, float] = {"allreduce": 8, "notified": 4, "server": 1, "average": 4}
"""Exchange methods, with the size of their buckets in MiB. `wiring.exchange` maps them to classes,
`wiring.average` makes the last, `wiring.candidates` says which sizes auto tries."""

_LOSSY_NOTIFIED_MB = 8  # with fewer bytes to overlap, a bucket's own work counts for more

CHOICES: Mapping[str, tuple[str, ...]] = {
    "sync": ("auto", *METHODS),
    "wire": ("fp32", "bf16", "int8"),
    "update": ("replicated", "sharded"),
    "param_dtype": ("float32", "bfloat16", "float16"),
    "transport": ("tcp", "nixl"),
    "shares": ("auto", "equal", "measured"),
}
"""Values of the options of an exchange; the first of each is the default."""

_WITHOUT_SERVERS = {
    "wire": "parameter servers get gradients uncompressed",
    "update": "parameter servers update all parameters",
    "transport": "parameter servers exchange by TCP",
}
"""Why an option of puts isn't one of parameter servers."""

_CONNECTS = "allreduce makes its own connections, by Gloo or NCCL"
_ALLREDUCE = {
    "wire": "allreduce sends gradients uncompressed",
    "update": "with allreduce every worker updates its copy",
    "transport": _CONNECTS,
    "connections": _CONNECTS,
}
"""Why an option of puts isn't one of allreduce."""

ServerPlace = Literal["run", "apart"]
StalenessRate = Literal["given", "scale"]
ASYNCHRONOUS = "async"  # in place of a number of versions

if TYPE_CHECKING:
    Sync: TypeAlias = str
    Wire: TypeAlias = str
    Update: TypeAlias = str
    ParamDtype: TypeAlias = str
    Transport: TypeAlias = str
    Shares: TypeAlias = str
else:
    Sync, Update, ParamDtype, Transport, Shares = (
        Literal[CHOICES[name]] for name in ("sync", "update", "param_dtype", "transport", "shares")
    )
    Wire = str  # codecs of merges have a fraction


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Gradient exchange."""

    sync: Sync = "auto"
    """Exchange method. allreduce: collectives (NCCL on GPUs, Gloo on CPUs). notified: one-sided
    puts (shared memory inside a machine, TCP between machines), without a barrier in a step.
    server: parameter servers own the parameters, and update them by the workers' gradients.
    average: workers train locally and merge their weights every --average_every steps, by puts; not
    exact, for links that are too slow for an exchange in each step. auto: predict allreduce and
    notified with several bucket sizes from the first training steps, measure the best, report the
    choice, and continue with it, also after a resume."""

    wire: Wire = "fp32"
    """With notified, the encoding of float32 gradients between machines: fp32 (unchanged), bf16
    (half the bytes) or int8 (a quarter). Rounding errors are added to the next step's gradients
    (error feedback). With average, that of changes of weights, also int4 (an eighth), or topk:0.02,
    which sends the largest 2% of each 4,096 values in 2 bits, topk:0.02:4 in 4."""

    update: Update = "replicated"
    """replicated: every worker updates all parameters. sharded (with notified): each worker updates
    the shard that it reduces and stores only that shard's optimizer state."""

    param_dtype: ParamDtype = "float32"
    """Data type in which the model's matrices are stored, and their gradients exchanged. With
    bfloat16 or float16, --update sharded: the shard's owner has a float32 master of each, sums the
    gradients in float32, and updates the master. Checkpoints have the masters, so a later start of
    the run may change it."""

    transport: Transport = "tcp"
    """With notified or average, the transport of the puts. tcp: TCP between machines and shared
    memory inside a machine. nixl: NVIDIA's RDMA library for both (pip install 'paceline[nixl]')."""

    connections: int = 0
    """With notified or average, the number of TCP connections to each worker of another machine.
    Use several if one cannot fill the link (high latency or packet loss). 0: with --sync auto,
    selected by autotuning; otherwise, one."""

    num_servers: int = 1
    """With --sync server, the number of parameter servers. Each owns an equal part of the
    parameters. A resumed run may change it."""

    staleness: str = "0"
    """With --sync server, by how many steps the parameters that a worker reads may be behind. 0:
    synchronous, equal to one process. K > 0: a worker that is faster for a while leads the slowest
    one by up to K steps and doesn't wait; the result depends on the workers' speeds. Workers and
    servers hold K + 1 versions of what they receive in memory. async: each worker's gradients are
    an update of their own, in the order in which they arrive."""

    staleness_lr: StalenessRate = "given"
    """With --staleness async, the learning rate of an update by gradients that are s > 1 updates
    old. given: that of the step. scale: that, divided by s."""

    parameter_servers: ServerPlace = "run"
    """With --sync server, what starts the parameter servers. run: `paceline train`, on machine 0.
    apart: a user, with `paceline serve`, on any machine. Under another launcher they are always
    apart."""

    bucket_mb: float = 0.0
    """Bucket size in MiB. 0: with --sync auto, selected by autotuning; otherwise, the method's
    default (allreduce: 8; notified: 4, with --wire bf16 or int8 8; server: 1; average: 4)."""

    shares: Shares = "auto"
    """How the workers divide the global batch. equal: all train as many samples. measured: in
    proportion to each worker's measured speed, so that all need equally long for a step; the result
    is that of equal shares, up to the order of summation. Shares change a few steps after a speed
    has changed. Not with GPUs, with one worker, or with --sync average. auto: measured with
    --staleness async, where each worker trains as many samples as its speed allows; else equal."""

    def __post_init__(self) -> None:
        at_least(self, 0, "bucket_mb")
        at_least(self, 1, "num_servers")
        if not (self.staleness.isdecimal() or self.staleness == ASYNCHRONOUS):
            raise ConfigError(
                flag="staleness",
                value=self.staleness,
                rule=f"must be a whole number of at least 0, or {ASYNCHRONOUS}",
            )
        if self.staleness_lr == "scale" and self.staleness != ASYNCHRONOUS:
            raise ConfigError(
                flag="staleness_lr",
                value=self.staleness_lr,
                rule="only asynchronous updates have rates of their own",
                remedy=Message("leave it out, or use {--staleness} async"),
            )
        self._check_servers()
        within("connections", self.connections, 0, 33)
        if self.sync != "average" and self.wire not in CHOICES["wire"]:
            names = ", ".join(CHOICES["wire"])
            raise ConfigError(
                flag="wire",
                value=self.wire,
                rule=f"must be one of {names}",
                remedy=Message("use {--sync} average for int4 and topk:FRACTION"),
            )
        if self.sync == "allreduce" and self.put_options:
            flag = self.put_options[0]
            raise ConfigError(
                Message(
                    f"{{--{flag}}} {{}} needs {{--sync}} notified: {_ALLREDUCE[flag]}.",
                    getattr(self, flag),
                )
            )
        if self.sync == "average" and self.update == "sharded":
            raise ConfigError(
                Message(
                    "{--update} sharded needs {--sync} notified: with average every worker trains "
                    "its own copy of the model."
                )
            )
        if self.sync == "average" and self.shares == "measured":
            raise ConfigError(
                Message(
                    "{--shares} measured can't be used with {--sync} average, whose workers wait "
                    "for each other at merges only: leave out {--shares}, or use {--sync} notified "
                    "or allreduce."
                )
            )
        self._check_narrow()
        if self.transport == "nixl" and self.connections > 1:
            raise ConfigError(
                Message(
                    "{--connections} {} needs {--transport} tcp: NIXL makes its own connections.",
                    self.connections,
                )
            )

    def _check_narrow(self) -> None:
        """Refuse narrow parameters where each worker would have all masters, or a wire narrows."""
        if not self.narrow:
            return
        if self.sync not in ("auto", "notified") or self.update != "sharded":
            raise ConfigError(
                flag="param_dtype",
                value=self.param_dtype,
                rule=Message(
                    "needs {--update} sharded with {--sync} notified: elsewhere every worker would "
                    "hold the float32 masters of all parameters, and save nothing"
                ),
                remedy=Message("add {--update} sharded, or leave out {--param_dtype}"),
            )
        if self.wire != "fp32":
            raise ConfigError(
                flag="wire",
                value=self.wire,
                rule=Message("gradients are sent in {--param_dtype} {}", self.param_dtype),
                remedy=Message("leave out {--wire}"),
            )

    @property
    def narrow(self) -> bool:
        """Whether parameters are stored in 16 bits, with float32 masters at their owners."""
        return self.param_dtype != "float32"

    def _check_servers(self) -> None:
        """Refuse servers without a use, and options that the exchange with servers doesn't have."""
        defaults = {"num_servers": 1, "staleness": "0", "parameter_servers": "run"}
        for flag, default in defaults.items():
            if self.sync != "server" and getattr(self, flag) != default:
                raise ConfigError(
                    flag=flag,
                    value=getattr(self, flag),
                    rule=Message(
                        "{--sync} {} exchanges gradients without parameter servers", self.sync
                    ),
                    remedy=Message("leave it out, or use {--sync} server"),
                )
        for flag, rule in _WITHOUT_SERVERS.items():
            if self.sync == "server" and flag in self.put_options:
                raise ConfigError(
                    flag=flag,
                    value=getattr(self, flag),
                    rule=rule,
                    remedy=Message(
                        f"leave out {{--{flag}}}, or use {{--sync}} notified in place of server"
                    ),
                )

    @property
    def versions_behind(self) -> int | None:
        """Versions by which the parameters of a step may be behind; None: any number."""
        return None if self.staleness == ASYNCHRONOUS else int(self.staleness)

    @property
    def stale(self) -> bool:
        """Whether workers may be in different steps."""
        return self.versions_behind != 0

    @property
    def measures_shares(self) -> bool:
        """Whether the workers' shares of the global batch follow their speeds."""
        asynchronous = self.sync == "server" and self.staleness == ASYNCHRONOUS
        return self.shares == "measured" or (self.shares == "auto" and asynchronous)

    @property
    def put_options(self) -> list[str]:
        """The options given that only puts have."""
        given = {
            "wire": self.wire != "fp32",
            "update": self.update != "replicated",
            "transport": self.transport != "tcp",
            "connections": self.connections > 1,
        }
        return [flag for flag, is_given in given.items() if is_given]

    @property
    def idle_on_one_machine(self) -> list[Message]:
        """A sentence for each flag that has no effect where all workers share memory."""
        return [
            Message(
                f"{{--{flag}}} {{}} has no effect on one machine, because its workers use shared "
                "memory; it applies to traffic between machines.",
                getattr(self, flag),
            )
            for flag in self.put_options
            if flag in ("wire", "connections")
            and self.transport != "nixl"  # which shares none
            and self.sync != "server"  # which is reached by TCP
        ]

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket; the method is chosen."""
        default = METHODS[self.sync]
        if self.sync == "notified" and self.wire != "fp32":
            default = _LOSSY_NOTIFIED_MB
        return round((self.bucket_mb or default) * 2**20)
