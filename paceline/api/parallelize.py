"""`parallelize`: one model on all ranks, and the checks that it is one that can be exchanged."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.api.argument_names import as_arguments, in_python
from paceline.api.tracked import refuse_foreign
from paceline.api.world import World
from paceline.cluster.rendezvous.preflight import model_facts
from paceline.cluster.supervision.supervisor import say
from paceline.codecs.codecs import CODECS
from paceline.comm.communicator import broadcast_bytes
from paceline.comm.nixl.agent import require_nixl
from paceline.config.world import SyncConfig
from paceline.errors import ConfigError
from paceline.replica.hooks import patch
from paceline.replica.replica import Replica
from paceline.update.batch_norm import BatchShare, convert_sync_batchnorm
from paceline.wiring.exchange import (
    SYNCHRONIZERS,
    TRANSPORTS,
    UPDATES,
    refuse_gpu,
    replicate,
)

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

    All ranks get rank 0's parameters, buffers and optimizer state; a run that goes on, those of its
    checkpoint.

    Args:
        model: on `world.device`, the same on all ranks but for its values.
        optimizer: any but LBFGS and SparseAdam, of the model's parameters.
        world: of which the processes are.
        sync: how gradients are exchanged: "allreduce", by collectives, "notified", by puts, or
            "auto", which tries both in the first steps and goes on with the faster one.
        wire: what float32 gradients are between machines, with "notified": "fp32", as they are,
            "bf16", half of the bytes, or "int8", a quarter.
        update: who updates a parameter: "replicated", every rank its copy, or "sharded", with
            "notified", the rank that adds up its gradients; each has a share of the state.
        transport: how puts travel, with "notified": "tcp", with shared memory inside a machine, or
            "nixl", by NVIDIA's library for RDMA.
        connections: TCP connections to each rank of another machine, with "notified"; 0: one, or
            what "auto" chooses.
        bucket_mb: size of a bucket, the unit of communication, in MiB; 0: the method's own, or
            what "auto" chooses.
        sync_bn: make BatchNorm's statistics those of the global batch.

    Raises:
        ConfigError: model or optimizer can't be exchanged, differ between the ranks, or aren't
            those of the checkpoint.
        CommError: a peer was lost, or silent.
    """
    with in_python():
        training = world._training
        session, link = training.session, training.session.link
        training.require_open("paceline.parallelize()")
        asked: dict[str, Any] = {
            "sync": sync,
            "wire": wire,
            "update": update,
            "transport": transport,
        }
        asked |= {"connections": connections, "bucket_mb": bucket_mb}
        config = _exchange_of(asked, world)
        _check(model, optimizer, world)
        state = chain(model.named_parameters(), model.named_buffers())
        link.agree("model", model_facts(state))
        link.agree("optimizer", {"the optimizer": type(optimizer).__name__, **asked})
        link.agree("parameter groups", _group_facts(optimizer))
        share = BatchShare()
        if sync_bn:
            layers = link.connect("layers", session.resources)
            converted = convert_sync_batchnorm(model, layers, share)
            assert converted is model
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
        training.start.restore(parts)
        _share_state(optimizer, world)
        if session.run is not None:
            for name, part in parts.items():
                refuse_foreign(f"{name}.state_dict()", part.state_dict())
        peers = replace(session.peers, intra_machine=link.connect_machine(sync, session.resources))
        replica = replicate(model, optimizer, peers, config, share, session.setting)
        told = list(training.start.restore_exchange(replica))
        if len(link.joined.members.machines) == 1:
            told += config.idle_on_one_machine
        for note in told if world.rank == 0 else ():
            say(as_arguments(note))
        session.resources.callback(replica.close)
        session.resources.callback(_refuse_outside(optimizer, replica))
        training.bind(replica, model, optimizer, parts)
    return model, optimizer


def _exchange_of(asked: dict[str, Any], world: World) -> SyncConfig:
    known = {
        "sync": ("auto", *SYNCHRONIZERS),
        "wire": CODECS,
        "update": UPDATES,
        "transport": TRANSPORTS,
    }
    for name, values in known.items():
        if asked[name] not in values:
            raise ConfigError(f"{name} is {asked[name]!r}; there is {', '.join(values)}.")
    config = SyncConfig(**asked)
    if world.device.type == "cuda":
        refuse_gpu(config)
    if config.transport == "nixl":
        require_nixl()
    return config


def _check(model: nn.Module, optimizer: Optimizer, world: World) -> None:
    if world._training.bound:
        raise ConfigError(
            "paceline.parallelize() was called before with this world: a world trains one model; "
            "put several into one nn.ModuleList, with one optimizer."
        )
    if isinstance(model, DistributedDataParallel):
        raise ConfigError(
            "the model is wrapped in DistributedDataParallel, which exchanges gradients as well: "
            "give the model itself."
        )
    if isinstance(model, nn.modules.batchnorm._BatchNorm):
        raise ConfigError("the model is a single BatchNorm: put it into an nn.Sequential.")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.device != world.device:
            raise ConfigError(
                f"the model's {name} is on {tensor.device}, and this rank computes on "
                f"{world.device}: model.to(world.device) before the optimizer is made."
            )
    ours = set(model.parameters())
    groups = optimizer.param_groups
    if ours and not any(p in ours for group in groups for p in group["params"]):
        raise ConfigError(
            "the optimizer has none of the model's parameters: make it of model.parameters(), "
            "after the model was moved to its device or changed."
        )


def _group_facts(optimizer: Optimizer) -> dict[str, str]:
    """Return what must be equal of the ranks' parameter groups."""
    facts = {}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            told = value.tolist() if isinstance(value, Tensor) else value
            told = f"{len(value)} tensors" if name == "params" else told
            facts[f"{name} of the optimizer's group {number}"] = str(told)
    return facts


def _share_state(optimizer: Optimizer, world: World) -> None:
    """Give all ranks the state of rank 0's optimizer, if it has made or loaded one."""
    data = io.BytesIO()
    if world.rank == 0 and optimizer.state:
        torch.save(optimizer.state_dict(), data)
    communicator = world._training.session.communicator
    what = "the broadcast of rank 0's optimizer state"
    told = broadcast_bytes(communicator, data.getvalue(), world.device, what)
    if told and world.rank > 0:
        state = torch.load(io.BytesIO(told), map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state)


def _refuse_outside(optimizer: Optimizer, replica: Replica) -> Callable[[], None]:
    """Refuse updates that no exchange precedes; return what undoes that."""
    step = optimizer.step

    def guarded(_: object, *args: Any, **kwargs: Any) -> Any:
        if replica.ended:
            raise ConfigError(
                "optimizer.step() was called outside of a step, or twice in one, where no "
                "gradients were exchanged: call it once in each `with world.step():` block."
            )
        return step(*args, **kwargs)

    return patch(optimizer, "step", guarded)
