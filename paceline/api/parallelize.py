"""`parallelize`: binds a model and its optimizer, or several, to the exchange among all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.optim import Optimizer

from paceline.api.argument_names import errors_name_arguments, print_message_for_scripts
from paceline.api.module_checks import require_supported_modules
from paceline.api.pairs import make_pairs, refuse_shared
from paceline.api.world import World, require_world
from paceline.cluster.rendezvous.preflight import model_facts
from paceline.cluster.rendezvous.server_registration import started_servers
from paceline.codecs.merge_codecs import merge_codec
from paceline.comm.nixl.agent import require_nixl
from paceline.config.server import Server, parse_server
from paceline.config.world import ASYNCHRONOUS, CHOICES, SyncConfig
from paceline.errors import ConfigError, many
from paceline.parallel.divided_modules import wholes_of
from paceline.parallel.stage import Stage
from paceline.session.exchange_checks import check_shares, refuse_gpu, refuse_stale
from paceline.session.resume.edits import parameter_names
from paceline.update.batch_norm import (
    BatchShare,
    batch_norms,
    convert_sync_batchnorm,
    synchronised_note,
)
from paceline.update.outer.average import Average, parse_average
from paceline.wiring.pairs import Pair

Model = TypeVar("Model", bound=nn.Module | Sequence[nn.Module])
_BUFFERS = ("broadcast", "local")

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer | Sequence[Optimizer])


def parallelize(
    model: Model,
    optimizer: AnyOptimizer,
    world: World,
    *,
    sync: str | Average | Server = "auto",
    wire: str = "fp32",
    update: str = "replicated",
    param_dtype: str = "float32",
    transport: str = "tcp",
    connections: int = 0,
    bucket_mb: float = 0.0,
    shares: str = "auto",
    sync_bn: bool = False,
    buffers: str = "broadcast",
) -> tuple[Model, AnyOptimizer]:
    """Train a model on all ranks of a world; return the same two objects. Collective.

    All ranks receive rank 0's parameters, buffers and optimizer state. In a resumed run these are
    the checkpoint's.

    Before the first step it may be called for several models, each with its own arguments. Then an
    exchange begins when the optimizer steps, and "auto" is "allreduce" where that fits.

    Args:
        model: on `world.device`, with the same modules and shapes on all ranks; or a list of models
            that the optimizers train together.
        optimizer: of the model's parameters; any but LBFGS; or a list of optimizers,
            each of its own parameters.
        world: whose processes train the model.
        sync: how gradients are exchanged: "allreduce", by collectives; "notified", by one-sided
            puts; or "auto", which predicts both from the first steps, tries the best, and continues
            with the fastest. "server", a `Server`, or its text, such as "server:servers=2": by
            servers, which own the parameters and update them. Or how weights are averaged
            instead, every few steps: "average", an `Average`, or its text, such as
            "average:every=50,outer=diloco".
        wire: how float32 gradients are encoded between machines, with "notified": "fp32",
            unchanged; "bf16", half of the bytes; or "int8", a quarter. With "average", how
            changes of weights are: also "int4", an eighth, or "topk:0.02", the largest 2%.
        update: where a parameter is updated: "replicated", on every rank; or "sharded", with
            "notified", on the rank that owns its shard and keeps the shard's optimizer state.
        param_dtype: the dtype in which matrices are stored and their gradients are exchanged:
            "bfloat16" or "float16", with update="sharded", whose owners then have float32 masters
            and sum in float32. Give the model in float32, and run its forward within
            `torch.autocast`. One model and one optimizer alone.
        transport: how puts travel, with "notified" and "average": "tcp", with shared memory
            inside a machine, or "nixl", by NVIDIA's library for RDMA.
        connections: the number of TCP connections to each rank of another machine, with
            "notified"; 0: one, or the number that "auto" selects.
        bucket_mb: the size of a bucket, the unit of communication, in MiB; 0: the default of the
            method, or the size that "auto" selects.
        shares: how the ranks divide the loader's global batches: "equal"; "measured", in
            proportion to each rank's measured speed, on CPUs and the same for all models, with the
            result of equal shares, up to the order of summation; or "auto": measured with
            staleness None, where a step trains one batch whose samples the loader counts, else
            equal.
        sync_bn: compute BatchNorm's statistics over the global batch. Torch's `SyncBatchNorm`
            layers do that in any case.
        buffers: what becomes of buffers in the state dict that a model computes from its samples,
            such as an observer's ranges: "broadcast", all ranks get rank 0's after each step; or
            "local", each rank has its own, and rank 0's are saved. Running statistics of BatchNorm
            are averaged. With "average" or staleness above 0, buffers are each worker's own.

    Raises:
        ConfigError: model or optimizer can't be exchanged, differ between the ranks, or don't
            match the checkpoint.
        CommError: a peer is lost or silent.
    """
    require_world(world, "paceline.parallelize()")
    activities = world._run.context.activities
    with errors_name_arguments(), activities.call("paceline.parallelize()"):
        run = world._run
        context = world._run.context
        world._end.require_open("paceline.parallelize()")
        if not isinstance(sync, str | Average | Server):
            raise ConfigError(
                f"sync is {sync!r}; it must be a text, a paceline.Average(…) or a "
                "paceline.Server(…)."
            )
        if not isinstance(wire, str):
            raise ConfigError(f"wire is {wire!r}; it must be a text.")
        if buffers not in _BUFFERS:
            raise ConfigError(f"buffers is {buffers!r}; it must be one of {', '.join(_BUFFERS)}.")
        method = _read_sync(sync)
        average = method if isinstance(method, Average) else None
        server = method if isinstance(method, Server) else None
        if average is not None:
            method = "average"
        arguments: dict[str, Any] = {
            "sync": "server" if server is not None else method,
            "num_servers": 1 if server is None else number_of_servers(server, run.store),
            "staleness": _staleness(server),
            "staleness_lr": "given" if server is None else server.staleness_lr,
            "wire": wire,
            "update": update,
            "param_dtype": param_dtype,
            "transport": transport,
            "connections": connections,
            "bucket_mb": bucket_mb,
            "shares": shares,
        }
        config = _checked_config(arguments, world)
        models = _checked_models(model)
        given = optimizer if isinstance(optimizer, Iterable) else [optimizer]
        optimizers: Sequence[Optimizer] = [_checked_optimizer(one) for one in given]
        _check(models, optimizers, world)
        if config.stale:  # a broadcast in each step would be a barrier
            buffers = "local"
        share = BatchShare()
        pairs = make_pairs(models, optimizers, world._models.pairs, config, share, average, buffers)
        _refuse_several_narrow([*world._models.pairs, *pairs])
        whole = pairs[0].model
        number = f" {len(world._models.pairs) + 1}" if world._models.pairs else ""
        world._session.agree(
            f"model{number}", {**model_facts(_state(whole)), **_layout_facts(whole)}, "data"
        )
        facts = {} if average is None else average.facts()
        kinds = ", ".join(type(one).__name__ for one in optimizers)
        world._session.agree(
            f"optimizer{number}",
            {"the optimizer": kinds, **arguments, **facts, "buffers": buffers},
        )
        world._session.agree(f"parameter groups{number}", _group_facts(whole, optimizers), "data")
        synchronised = batch_norms(whole, every=sync_bn, averaged=average is not None)
        if synchronised:
            refuse_stale(config, {"sync_bn": True})
            run.open("data", "layers")
            converted = convert_sync_batchnorm(whole, run, share, every=sync_bn)
            assert converted is whole
            if not sync_bn and world.rank == 0:
                print_message_for_scripts(synchronised_note(synchronised))
        for pair in pairs:
            world._models.restore(pair)
        world._loop.use(world._models.bind(pairs))
        served = average is not None and average.through == "server"  # which is reached by TCP
        if world.rank == 0:
            one_machine = len(context.world.generation.workers_per_machine) == 1
            for note in chain(
                config.idle_on_one_machine if one_machine and not served else (),
                idle_servers(run.store) if server is None and not served else (),
                undivided([pair.model for pair in world._models.pairs], context.mesh.lengths),
            ):
                print_message_for_scripts(note)
    return model, optimizer


def _read_sync(sync: str | Average | Server) -> str | Average | Server:
    """Read the text of averaging or of servers; return the name of another exchange as it is."""
    if not isinstance(sync, str):
        return sync
    return parse_average(sync) or parse_server(sync) or sync


def number_of_servers(server: Server, store: Store | None) -> int:
    """Return the number of servers: the one given, or that of those that a launcher has started.

    Raises:
        ConfigError: a launcher has started more than are given.
    """
    started = 0 if store is None else started_servers(store)
    if server.servers is None:
        return started or 1
    if started > server.servers:
        raise ConfigError(
            f"servers={server.servers}: paceline launch started {many(started, 'server')} with "
            f"--num_servers {started}, and some would have nothing to do; use "
            f"servers={started}, or leave it out."
        )
    return server.servers


def idle_servers(store: Store | None) -> Iterator[str]:
    """Yield what a start says whose launcher has started servers for another exchange."""
    started = 0 if store is None else started_servers(store)
    if started:
        yield (
            f"paceline launch started {many(started, 'server')} with --num_servers {started}, "
            'which this model doesn\'t use: pass sync="server" to paceline.parallelize(), or leave '
            "out --num_servers."
        )


def undivided(models: Sequence[nn.Module], lengths: Mapping[str, int]) -> Iterator[str]:
    """Yield what a start says in whose mesh no model is divided.

    Args:
        models: those of the world.
        lengths: of the mesh's axes.
    """
    divided = any(wholes_of(module) for model in models for module in model.modules())
    if divided or any(isinstance(model, Stage) for model in models):
        return
    for axis, call in (("stage", "stages"), ("tensor", "tensor_parallel")):
        if lengths[axis] > 1:
            yield (
                f"mesh has the axis {axis!r} of {lengths[axis]} ranks, which all train a model of "
                f"their own: pass it to paceline.{call}() before paceline.parallelize(), or leave "
                f"out {axis!r}."
            )


def _staleness(server: Server | None) -> str:
    """Return the staleness as the flag has it."""
    if server is None:
        return "0"
    return ASYNCHRONOUS if server.staleness is None else str(server.staleness)


def _checked_config(arguments: dict[str, Any], world: World) -> SyncConfig:
    for name, values in CHOICES.items():
        if name == "wire" and arguments["sync"] == "average":
            merge_codec(arguments[name])
        elif arguments[name] not in values:
            raise ConfigError(
                f"{name} is {arguments[name]!r}; it must be one of {', '.join(values)}."
            )
    config = SyncConfig(**arguments)
    check_shares(config, world._run.context.along("data").size)
    pairs = world._models.pairs
    if pairs and pairs[0].config.measures_shares is not config.measures_shares:
        raise ConfigError(
            f"shares is {config.shares!r}, but was {pairs[0].config.shares!r} in an earlier "
            "call of paceline.parallelize(): all models train the same batches; pass the same."
        )
    if world.device.type == "cuda":
        refuse_gpu(config)
    if config.transport == "nixl":
        require_nixl()
    return config


def _refuse_several_narrow(pairs: Sequence[Pair]) -> None:
    if len(pairs) > 1 and any(pair.config.narrow for pair in pairs):
        raise ConfigError(
            "param_dtype was given with several models or optimizers, but masters are made for one "
            "of each: leave it out, or use one optimizer with several parameter groups."
        )


def _checked_models(model: object) -> Sequence[nn.Module]:
    """Return the models that were given, as a list."""
    models = [model] if isinstance(model, nn.Module) or not isinstance(model, Iterable) else model
    listed = list(models)
    for one in listed:
        if not isinstance(one, nn.Module):
            raise ConfigError(
                f"paceline.parallelize() got {type(one).__name__} as its model: pass the model, "
                "its optimizer and the world, in this order."
            )
    return listed


def _checked_optimizer(optimizer: object) -> Optimizer:
    """Return an optimizer; refuse other objects, and wrappers that torch hasn't set up."""
    if isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
        return optimizer
    lack = "which is no torch.optim.Optimizer"
    if isinstance(optimizer, Optimizer):
        lack = "whose constructor did not call torch.optim.Optimizer's"
    raise ConfigError(
        f"paceline.parallelize() got {type(optimizer).__name__} as an optimizer, {lack}: if it "
        "wraps an optimizer, pass that one, and call step() of the wrapper as before."
    )


def _check(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], world: World) -> None:
    if world._loop.begun:
        raise ConfigError(
            "paceline.parallelize() was called after the first step: call it for all models before "
            "the first step; in a notebook, run the cell with paceline.join() again, too."
        )
    if not models or not optimizers:
        raise ConfigError("paceline.parallelize() got an empty list: give what is to be trained.")
    refuse_shared(models, optimizers, world._models.pairs)
    for model in models:
        _check_model(model, world)
    model_parameters = {p for model in models for p in model.parameters()}
    for optimizer in optimizers:
        groups = optimizer.param_groups
        if model_parameters and not any(
            p in model_parameters for group in groups for p in group["params"]
        ):
            raise ConfigError(
                "the optimizer has none of the model's parameters: create it with "
                "model.parameters(), after moving or changing the model."
            )
        refuse_other_stages(models, model_parameters, optimizer)
        if any(getattr(p, "paceline_divided", False) for g in groups for p in g["params"]):
            raise ConfigError(
                "the optimizer has parameters that paceline.tensor_parallel() has divided since: "
                "create it with model.parameters() afterwards."
            )


def refuse_other_stages(
    models: Sequence[nn.Module], own: Collection[nn.Parameter], optimizer: Optimizer
) -> None:
    """Refuse an optimizer that was made of a whole model, of which this rank has a stage.

    Raises:
        ConfigError: it has parameters that the stage hasn't.
    """
    if any(isinstance(model, Stage) for model in models):
        for group in optimizer.param_groups:
            if others := sum(p not in own for p in group["params"]):
                raise ConfigError(
                    f"the optimizer has {many(others, 'parameter')} that this rank's stage hasn't: "
                    "create it with model.parameters() of what paceline.stages() returns."
                )


def _check_model(model: nn.Module, world: World) -> None:
    if isinstance(model, nn.modules.batchnorm._BatchNorm):
        raise ConfigError("the model is a single BatchNorm: put it into an nn.Sequential.")
    require_supported_modules(model, world.device)
    for name, tensor in _state(model):
        if tensor.device != world.device:
            raise ConfigError(
                f"the model's {name} is on {tensor.device}, but this rank computes on "
                f"{world.device}: call model.to(world.device) before you make the optimizer."
            )


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _layout_facts(model: nn.Module) -> dict[str, str]:
    """Return for each embedding whether its gradient is sparse, which is equal on all ranks."""
    return {
        f"the gradient of the model's {name}.weight": "sparse" if module.sparse else "dense"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }


def _group_facts(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return the options and parameters of groups, which are equal on all ranks."""
    facts = {}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for number, group in enumerate(groups):
        for name, value in group.items():
            text = f"{len(value)} tensors" if name == "params" else _option_fact(value)
            facts[f"{name} of the optimizer's group {number}"] = text
    for number, names in enumerate(parameter_names(model, optimizers)):
        for place, name in enumerate(names):
            facts[f"parameter {place} of the optimizer's group {number}"] = name
    return facts


def _option_fact(value: object) -> str:
    """Return an option of a group as a text that is equal on ranks with equal options."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    plain = isinstance(value, str | int | float | tuple | list | None)
    return str(value) if plain else type(value).__name__  # an address says nothing
