"""Where a run leaves what it makes, and flags of Caffe2's that mean nothing any more."""

from __future__ import annotations

from dataclasses import dataclass, fields

from paceline.config.rules import at_least
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """The run's folder."""

    output_dir: str = "runs"
    """Folder of all runs; a run's log, events, checkpoints and weights are in
    <output_dir>/<run_id>."""

    resume: str = "auto"
    """auto: go on from the run's newest good checkpoint, if there is one. no: start a new run.
    Anything else is the path of another run's checkpoint to start from."""

    checkpoint_steps: int = 0
    """Save a checkpoint every so many steps; 0 goes by time and epochs only."""

    checkpoint_minutes: float = 5.0
    """Save a checkpoint every so many minutes, besides the one at each epoch's end; 0 is off."""

    keep_checkpoints: int = 2
    """Checkpoints to keep, the newest ones; the best of an epoch's end is kept besides."""

    trace_steps: str = ""
    """Trace these steps of the run, FIRST:LAST, counted from 0: every wait, put and notification of
    all ranks on one clock, in a file of the run's folder that Perfetto and chrome://tracing open.
    Give it on all machines."""

    def __post_init__(self) -> None:
        self.traced  # noqa: B018 - raises where the steps can't be read
        at_least("checkpoint_steps", self.checkpoint_steps, 0)
        at_least("checkpoint_minutes", self.checkpoint_minutes, 0)
        at_least("keep_checkpoints", self.keep_checkpoints, 1)

    @property
    def traced(self) -> range | None:
        """The steps in `--trace_steps`, if there are any.

        Raises:
            ConfigError: they aren't two numbers, the smaller one first.
        """
        first, colon, last = self.trace_steps.partition(":")
        if not self.trace_steps:
            return None
        if not (colon and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ConfigError(
                flag="trace_steps",
                value=self.trace_steps,
                rule="give the first and the last step, counted from 0, such as 100:104",
            )
        return range(int(first), int(last) + 1)


@dataclass(frozen=True, kw_only=True)
class LegacyConfig:
    """Accepted for old command lines, without a meaning."""

    use_nccl: bool = False
    """No meaning any more: GPUs always use NCCL."""

    distributed_transport: str = "tcp"
    """No meaning any more: TCP, or what NCCL finds."""

    enable_tensor_core: bool = False
    """No meaning any more: cuDNN chooses."""

    float16_compute: bool = False
    """No meaning any more: see --dtype."""

    cudnn_workspace_limit_mb: int = 64
    """No meaning any more: cuDNN chooses."""

    @property
    def given(self) -> tuple[str, ...]:
        """The flags whose value isn't the default."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)
