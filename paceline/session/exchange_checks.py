"""Checks of the options of an exchange against the processes and devices of a run."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.config.world import SyncConfig
from paceline.errors import ConfigError, Message


def refuse_gpu(config: SyncConfig) -> None:
    """Refuse options for which no method exchanges what is in a GPU's memory.

    Args:
        config: the options.

    Raises:
        ConfigError: there is no such method.
    """
    if config.sync == "server":
        raise ConfigError(
            Message(
                "{--sync} server supports CPUs only, but this run uses GPUs; use {--sync} notified "
                "or allreduce, or CPUs with {--use_cpu}."
            )
        )
    if config.update == "sharded":
        raise ConfigError(
            Message(
                "{--update} sharded supports CPUs only, but this run uses GPUs; use {--update} "
                "replicated, or CPUs with {--use_cpu}."
            )
        )
    if config.shares == "measured":
        raise ConfigError(
            Message(
                "{--shares} measured supports CPUs only, because GPUs' waits aren't measured; "
                "leave out {--shares}, or use CPUs with {--use_cpu}."
            )
        )
    if config.put_options and config.sync not in ("notified", "average"):
        flag = config.put_options[0]
        raise ConfigError(
            Message(
                f"{{--{flag}}} {{}} needs {{--sync}} notified, which {{--sync}} {{}} does not try "
                f"on GPUs; set {{--sync}} notified, or leave out {{--{flag}}}.",
                getattr(config, flag),
                config.sync,
            )
        )


def check_narrow(config: SyncConfig, dtype: str) -> None:
    """Require a forward that narrow parameters can be used in.

    Args:
        config: the options.
        dtype: in which forward and backward compute.

    Raises:
        ConfigError: they would compute in float32, or scale the loss.
    """
    if config.narrow and dtype != "bfloat16":
        raise ConfigError(
            flag="param_dtype",
            value=config.param_dtype,
            rule=Message(
                "needs a forward in bfloat16: float computes in float32 alone, and float16 with a "
                "loss scale, by which gradients of 16 bits can't be divided"
            ),
            remedy=Message("add {--dtype} bfloat16, or leave out {--param_dtype}"),
        )


def check_shares(config: SyncConfig, workers: int) -> None:
    """Refuse shares by measured speed where there is one worker.

    Args:
        config: the options.
        workers: number of workers of the run.

    Raises:
        ConfigError: there is only one.
    """
    if config.shares == "measured" and workers == 1:
        raise ConfigError(
            flag="shares",
            value=config.shares,
            rule="there is only one worker, which trains the whole batch",
            remedy=Message("start several workers, or leave out {--shares}"),
        )


def refuse_stale(config: SyncConfig, needs: Mapping[str, object]) -> None:
    """Refuse what needs all workers at once, where they are in different steps.

    Args:
        config: the options of the exchange.
        needs: what was given, by flag; false values aren't.

    Raises:
        ConfigError: something was given; names the first.
    """
    if not config.stale:
        return
    for flag, value in needs.items():
        if value:
            raise ConfigError(
                flag=flag,
                value=value,
                rule=Message(
                    "it needs the gradients or samples of all workers at once, but with "
                    "{--staleness} {} these are in different steps",
                    config.staleness,
                ),
                remedy=Message("leave it out, or use {--staleness} 0"),
            )
