"""Where a run leaves what it makes, and flags of Caffe2's that mean nothing any more."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """The run's folder."""

    output_dir: str = "runs"
    """Folder of all runs; a run's log, events and weights are in <output_dir>/<run_id>."""


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
