"""`parallelize`: binds one model and its optimizer to the exchange among all ranks."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.api.argument_names import (
    as_arguments,
    errors_name_arguments,
    print_message_for_scripts,
)
from paceline.api.tracked import refuse_foreign
from paceline.api.world import World
from paceline.cluster.rendezvous.preflight import model_facts
from paceline.comm.communicator import broadcast_state
from paceline.comm.nixl.agent import require_nixl
from paceline.config.world import CHOICES, SyncConfig
from paceline.errors import ConfigError, Message
from paceline.run.autotune import TrialSetting
from paceline.run.generation_context import GenerationContext
from paceline.update.batch_norm import BatchShare, convert_sync_batchnorm
from paceline.wiring import connect_machine
from paceline.wiring.exchange import refuse_gpu, replicate

Model = TypeVar("Model", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def parallelize(
    model: Model,
    optimizer: AnyOptimizer,
    world: World,
    *,
    sync: str = "auto",
    wire: str = "fp32",
    update: str = "replicated",
    transport: str = "tcp",
    connections: int = 0,
    bucket_mb: float = 0.0,
    sync_bn: bool = False,
) -> tuple[Model, AnyOptimizer]:
    """Train a model on all ranks of a world; return the same two objects. Collective.

    All ranks receive rank 0's parameters, buffers and optimizer state. In a resumed run these are
    the checkpoint's.

    Args:
        model: on `world.device`, with the same modules and shapes on all ranks.
        optimizer: of the model's parameters; any but LBFGS and SparseAdam.
        world: whose processes train the model.
        sync: how gradients are exchanged: "allreduce", by collectives; "notified", by one-sided
            puts; or "auto", which measures both in the first steps and continues with the faster.
        wire: how float32 gradients are encoded between machines, with "notified": "fp32",
            unchanged; "bf16", half of the bytes; or "int8", a quarter.
        update: where a parameter is updated: "replicated", on every rank; or "sharded", with
            "notified", on the rank that owns its shard and keeps the shard's optimizer state.
        transport: how puts travel, with "notified": "tcp", with shared memory inside a machine, or
            "nixl", by NVIDIA's library for RDMA.
        connections: the number of TCP connections to each rank of another machine, with
            "notified"; 0: one, or the number that "auto" measures to be faster.
        bucket_mb: the size of a bucket, the unit of communication, in MiB; 0: the default of the
            method, or the size that "auto" measures to be faster.
        sync_bn: compute BatchNorm's statistics over the global batch.

    Raises:
        ConfigError: model or optimizer can't be exchanged, differ between the ranks, or don't
            match the checkpoint.
        CommError: a peer is lost or silent.
    """
    with errors_name_arguments():
        session = world._session
        run, context = world._run, world._run.context
        world._end.require_open("paceline.parallelize()")
        arguments: dict[str, Any] = {
            "sync": sync,
            "wire": wire,
            "update": update,
            "transport": transport,
            "connections": connections,
            "bucket_mb": bucket_mb,
        }
        config = _checked_config(arguments, world)
        _check(model, optimizer, world)
        state = chain(model.named_parameters(), model.named_buffers())
        session.require_equal("model", model_facts(state))
        session.require_equal("optimizer", {"the optimizer": type(optimizer).__name__, **arguments})
        session.require_equal("parameter groups", _group_facts(optimizer))
        share = BatchShare()
        if sync_bn:
            run.connect(GenerationContext.connect_layers)
            converted = convert_sync_batchnorm(model, run.layers, share)
            assert converted is model
        saved_objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
        world._start.restore(saved_objects)
        _broadcast_optimizer_state(optimizer, world)
        if session.run is not None:
            for name, saved in saved_objects.items():
                refuse_foreign(f"{name}.state_dict()", saved.state_dict())
        run.connect(partial(connect_machine, device=world.device, sync=sync))

        def report(note: str | Message) -> None:
            run.recorder.event("note", text=as_arguments(note))
            print_message_for_scripts(note)

        setting = TrialSetting(folder=session.run, report=report)
        replica = replicate(model, optimizer, run, config, share, setting)
        session.resources.callback(replica.close)  # also where an error or an interrupt follows
        notes: list[str | Message] = list(world._start.restore_exchange(replica))
        if len(context.group.generation.workers_per_machine) == 1:
            notes += config.idle_on_one_machine
        for note in notes if world.rank == 0 else ():
            print_message_for_scripts(note)
        world._bind(model, optimizer, replica, saved_objects)
    return model, optimizer


def _checked_config(arguments: dict[str, Any], world: World) -> SyncConfig:
    for name, values in CHOICES.items():
        if arguments[name] not in values:
            raise ConfigError(
                f"{name} is {arguments[name]!r}; it must be one of {', '.join(values)}."
            )
    config = SyncConfig(**arguments)
    if world.device.type == "cuda":
        refuse_gpu(config)
    if config.transport == "nixl":
        require_nixl()
    return config


def _check(model: nn.Module, optimizer: Optimizer, world: World) -> None:
    if world._loop.replica is not None:
        raise ConfigError(
            "paceline.parallelize() was already called for this world, which trains one model: put "
            "several models into one nn.ModuleList, with one optimizer; in a notebook, run the "
            "cell with paceline.join() again, too."
        )
    if isinstance(model, DistributedDataParallel):
        raise ConfigError(
            "the model is wrapped in DistributedDataParallel, which also exchanges gradients: pass "
            "the unwrapped model."
        )
    if isinstance(model, nn.modules.batchnorm._BatchNorm):
        raise ConfigError("the model is a single BatchNorm: put it into an nn.Sequential.")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.device != world.device:
            raise ConfigError(
                f"the model's {name} is on {tensor.device}, but this rank computes on "
                f"{world.device}: call model.to(world.device) before you make the optimizer."
            )
    model_parameters = set(model.parameters())
    groups = optimizer.param_groups
    if model_parameters and not any(
        p in model_parameters for group in groups for p in group["params"]
    ):
        raise ConfigError(
            "the optimizer has none of the model's parameters: create it with model.parameters(), "
            "after moving or changing the model."
        )


def _group_facts(optimizer: Optimizer) -> dict[str, str]:
    """Return the options and sizes of parameter groups, which are equal on all ranks."""
    facts = {}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            text = str(value.tolist() if isinstance(value, Tensor) else value)
            text = f"{len(value)} tensors" if name == "params" else text
            facts[f"{name} of the optimizer's group {number}"] = text
    return facts


def _broadcast_optimizer_state(optimizer: Optimizer, world: World) -> None:
    """Broadcast the state of rank 0's optimizer, if it has any."""
    own = optimizer.state_dict() if world.rank == 0 and optimizer.state else None
    what = "the broadcast of rank 0's optimizer state"
    state = broadcast_state(world._run.context.communicator, own, world.device, what)
    if state is not None and world.rank > 0:
        optimizer.load_state_dict(state)
