"""Configuration of the output, and Caffe2's flags that are ignored."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from paceline.config.rules import at_least
from paceline.errors import ConfigError, Message

TRACKER_NAMES = ("tensorboard", "wandb", "mlflow")

_DIGITS = 18  # of a step's number, at most


SnapshotCopies = Literal["auto", "whole", "divided"]


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Output folder, checkpoints and tracing."""

    output_dir: str = "runs"
    """Folder of all runs; a run's log, events, checkpoints and weights are in
    <output_dir>/<run_id>."""

    config: str = ""
    """TOML file of flags, such as the config.toml of another run, which is then trained anew: a
    line `name = value` for each flag. Flags of the command line win."""

    resume: str = "auto"
    """auto: resume from the run's newest valid checkpoint, if there is one. no: start a new run.
    Any other value is the path of another run's checkpoint to start from."""

    reset_optimizer: bool = False
    """Begin the optimizer's state (momenta) anew where a checkpoint is resumed from, as is needed
    for an optimizer of another class; weights, epoch and schedule continue. A run does so
    once, even if each of its starts has this flag."""

    checkpoint_steps: int = 0
    """Number of steps between checkpoints; 0: save by time and at the end of epochs only."""

    checkpoint_minutes: float = 5.0
    """Minutes between timed checkpoints; 0 disables them. A checkpoint is also saved after each
    epoch."""

    keep_checkpoints: int = 2
    """Number of newest checkpoints to retain; the checkpoint of the best epoch is always retained
    in addition."""

    snapshots: bool = True
    """Take no in-memory snapshots. By default, each worker copies the training state to its
    machine's memory while steps run, as often as this takes less than 1% of the training time, and
    retains the two newest copies. Both together take about 4 times the size of the model
    (parameters and buffers) per worker: 2 times with --momentum 0, 3 times with two workers and
    --update sharded; on rank 0 half as much again while a checkpoint is written. Without them, a
    run that is stopped in the middle of a long step has the last checkpoint only. Machine 0's
    setting is used."""

    snapshot_memory_mb: float = 0.0
    """Limit of the memory for in-memory snapshots in MiB per worker; if the two newest would take
    more, none are taken. 0: no limit."""

    snapshot_copies: SnapshotCopies = "auto"
    """What each worker copies for in-memory snapshots, from three workers on. whole: all of the
    state. divided: its own part and that of another worker (on another machine, if there is one),
    where workers are equal: of N workers, 2/N of the memory. After the loss of one worker the
    others get the missing parts from each other; after the loss of both that have a part, the run
    continues from the last checkpoint, as it does if it is stopped in the middle of a long step.
    auto: divided where whole copies of all workers would take more than a quarter of the machine's
    memory. Machine 0's setting is used."""

    replica_check: bool = True
    """Don't compare the workers' parameters, buffers and optimizer states while the run trains. By
    default, their checksums are compared as often as this takes less than 0.1% of the time, and
    before a checkpoint is saved; a run whose workers differ stops. Machine 0's setting is used."""

    price_per_hour: float = 0.0
    """Price of a machine per hour, in any currency: the price of the run is shown with what else it
    cost. 0: no price is shown."""

    trace_steps: str = ""
    """Steps to trace, FIRST:LAST, counted from 0. Records every wait, put and notification of all
    ranks on a common clock, in a trace file for Perfetto or chrome://tracing in the run's folder.
    Give this flag on all machines."""

    tracker: str = ""
    """Experiment trackers that show the run, separated by commas: tensorboard, wandb (Weights &
    Biases), mlflow. Rank 0 alone writes to them. Each needs its package: pip install
    'paceline[tensorboard]', 'paceline[wandb]' or 'paceline[mlflow]'."""

    def __post_init__(self) -> None:
        self.traced  # noqa: B018 - raises where the steps can't be read
        self.trackers  # noqa: B018 - raises where there is no such tracker
        at_least(self, 0, "checkpoint_steps", "checkpoint_minutes", "snapshot_memory_mb")
        at_least(self, 0, "price_per_hour")
        at_least(self, 1, "keep_checkpoints")

    @property
    def traced(self) -> range | None:
        """The steps in `--trace_steps`, if there are any.

        Raises:
            ConfigError: they aren't two numbers, the smaller one first.
        """
        first, colon, last = self.trace_steps.partition(":")
        if not self.trace_steps:
            return None
        decimal = colon and first.isdecimal() and last.isdecimal() and len(last) <= _DIGITS
        if not decimal or int(first) > int(last):
            raise ConfigError(
                flag="trace_steps",
                value=self.trace_steps[:20],
                rule="give the first and the last step, counted from 0, such as 100:104",
            )
        return range(int(first), int(last) + 1)

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in `--tracker`, each once.

        Raises:
            ConfigError: one isn't a tracker.
        """
        names = [name.strip() for name in self.tracker.split(",")] if self.tracker else []
        if not set(names) <= set(TRACKER_NAMES):
            raise ConfigError(
                flag="tracker",
                value=self.tracker[:50],
                rule=f"must be one or more of {', '.join(TRACKER_NAMES)}, separated by commas",
            )
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class LegacyConfig:
    """Options that are accepted only for compatibility with Caffe2's command lines."""

    use_nccl: bool = False
    """Ignored: GPUs use NCCL, unless workers share one."""

    distributed_transport: str = "tcp"
    """Ignored: the transport is TCP, or selected by NCCL."""

    enable_tensor_core: bool = False
    """Ignored: cuDNN selects its algorithms itself."""

    float16_compute: bool = False
    """Ignored: use --dtype."""

    use_ideep: bool = False
    """Ignored: CPUs always use oneDNN."""

    resnext_num_groups: int = 1
    """Number of groups of Caffe2's ResNeXt. Only the value 1 is supported: it gives a ResNet."""

    resnext_width_per_group: int = 64
    """Width of a group of Caffe2's ResNeXt. Only the value 64 is supported: it gives a ResNet."""

    cudnn_workspace_limit_mb: int = 64
    """Ignored: cuDNN selects its algorithms itself."""

    def __post_init__(self) -> None:
        for flag in ("resnext_num_groups", "resnext_width_per_group"):
            supported = getattr(LegacyConfig, flag)
            if getattr(self, flag) != supported:
                raise ConfigError(
                    flag=flag,
                    value=getattr(self, flag),
                    rule=f"the built-in models are ResNets with {flag} {supported} only",
                    remedy=Message("give your own model with {--model} package.module:function"),
                )

    @property
    def given(self) -> tuple[str, ...]:
        """The flags whose value isn't the default."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)
