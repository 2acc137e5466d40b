"""A loop that is put together wrongly is told so, in a sentence with the remedy."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader

import paceline
from paceline import ConfigError, World
from paceline.update.batch_norm import SyncBatchNorm
from tests.harness.library.small_training import BATCH, loss_of, network, samples, sgd


@pytest.fixture
def world() -> Iterator[World]:
    """A world of this process alone."""
    with paceline.join() as world:
        yield world


@pytest.fixture
def model() -> nn.Module:
    return network()


def bound(world: World, model: nn.Module) -> torch.optim.Optimizer:
    return paceline.parallelize(model, sgd(model), world)[1]


def backward(model: nn.Module) -> None:
    x, y = samples(4)[:]
    loss_of(model, x, y).backward()


def in_step(world: World, *acts: Callable[[], object]) -> None:
    with world.step():
        for act in acts:
            act()


def test_a_second_world(world: World) -> None:
    with pytest.raises(ConfigError, match=r"join\(\) was already called.*close\(\) it first"):
        paceline.join()


def test_another_world_after_the_first_was_closed() -> None:
    for _ in range(2):
        with paceline.join() as world:
            assert world.world_size == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"timeout": 0}, r"^timeout 0: must be greater than 0"),
        ({"first_iter_timeout": -1}, r"^first_iter_timeout -1"),
        ({"checkpoint_steps": -1}, r"^checkpoint_steps -1: must be at least 0"),
        ({"keep_checkpoints": 0}, r"^keep_checkpoints 0: must be at least 1"),
        ({"snapshot_memory_mb": -1}, r"^snapshot_memory_mb -1: must be at least 0"),
        ({"resume": "other.pt"}, r"^resume other.pt needs a run"),
        ({"trace_steps": "2"}, r"^trace_steps 2: give the first and the last step.*100:104"),
        ({"trace_steps": "2:3"}, r"^trace_steps 2:3 needs a run"),
        ({"device": "meta"}, r"^device is meta.*cpu and cuda"),
        ({"device": "cuda:77"}, r"^device is cuda:77, but torch finds \d+ GPUs"),
    ],
    ids=str,
)
def test_arguments_of_join(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        paceline.join(**arguments)
    with paceline.join():  # nothing is left behind
        pass


def test_options_of_snapshots_reach_the_session() -> None:
    with paceline.join(snapshots=False, snapshot_memory_mb=1.5) as world:
        output = world._session.output
    assert (output.snapshots, output.snapshot_memory_mb) == (False, 1.5)


def test_ranks_compare_their_versions_and_their_arguments_of_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: dict[str, dict[str, str]] = {}

    def compare(
        store: object,
        members: object,
        subject: str,
        facts: dict[str, str],
        *,
        timeout: float,
    ) -> None:
        compared[subject] = facts

    monkeypatch.setattr(import_module("paceline.api.join"), "compare", compare)
    with paceline.join(tmp_path / "run", seed=7, trace_steps="2:3"):
        pass
    assert list(compared) == ["versions", "arguments of join()"]
    given = {"seed": "7", "run": "given", "trace_steps": "2:3"}
    assert compared["arguments of join()"] == given


@pytest.mark.parametrize("call", ["no_sync", "reduce", "settle", "step"])
def test_before_parallelize(world: World, call: str) -> None:
    use = in_step if call == "step" else getattr(World, call)
    with pytest.raises(ConfigError, match=rf"world\.{call}\(\) was called before .*parallelize"):
        use(world)


def test_parallelize_with_a_model_twice(world: World, model: nn.Module) -> None:
    bound(world, model)
    with pytest.raises(ConfigError, match=r"with this model \(Sequential\): call it once for each"):
        bound(world, model)


def test_parallelize_with_an_optimizer_twice(world: World, model: nn.Module) -> None:
    other = network()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    paceline.parallelize(model, optimizer, world)
    with pytest.raises(ConfigError, match=r"with this optimizer \(SGD\).*\[a, b\], optimizer"):
        paceline.parallelize(other, optimizer, world)


def test_parallelize_with_a_parameter_of_two_models(world: World, model: nn.Module) -> None:
    bound(world, model)
    head = nn.Linear(3, 1)
    with pytest.raises(ConfigError, match=r"0\.0\.weight of Sequential.*pass both in one call"):
        paceline.parallelize(nn.Sequential(model, head), sgd(head), world)


def test_parallelize_with_a_parameter_of_two_optimizers(world: World, model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"is in two optimizers.*each parameter to one"):
        paceline.parallelize(model, [sgd(model), sgd(model)], world)


@pytest.mark.parametrize(("models", "optimizers"), [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_parallelize_with_wrong_lists(
    world: World, model: nn.Module, models: int, optimizers: int
) -> None:
    optimizer = sgd(model)
    with pytest.raises(ConfigError, match=r"got an empty list|an object twice in a list"):
        paceline.parallelize([model] * models, [optimizer] * optimizers, world)


class Wrapper:
    """A wrapper of an optimizer, as libraries have them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self) -> None:
        self.inner.step()


class TorchWrapper(Wrapper, torch.optim.Optimizer):
    """One that is an optimizer by its class alone, which plain torch allows."""


@pytest.mark.parametrize(
    ("kind", "lack"),
    [
        (Wrapper, "is no torch.optim.Optimizer"),
        (TorchWrapper, "constructor did not call torch.optim.Optimizer's"),
    ],
)
def test_parallelize_with_a_wrapper_of_an_optimizer(
    world: World, model: nn.Module, kind: Any, lack: str
) -> None:
    wrapper = kind(sgd(model))
    rule = rf"got {kind.__name__} as an optimizer, wh\w+ {lack}: .*pass that one"
    for given in (wrapper, [wrapper]):
        with pytest.raises(ConfigError, match=rule):
            paceline.parallelize(model, given, world)
    paceline.parallelize(model, wrapper.inner, world)
    before = copy.deepcopy(model.state_dict())
    in_step(world, lambda: backward(model), wrapper.step)
    after = model.state_dict()
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_parallelize_after_the_first_step(world: World, model: nn.Module) -> None:
    optimizer = bound(world, model)
    in_step(world, lambda: backward(model), optimizer.step)
    with pytest.raises(ConfigError, match=r"after the first step: call it for all models before"):
        bound(world, network())


def test_the_optimizers_step_twice_in_one_step(world: World, model: nn.Module) -> None:
    first, other = bound(world, model), network()
    second = bound(world, other)
    with pytest.raises(ConfigError, match="outside a step, or twice"):
        in_step(
            *(world, lambda: backward(model), lambda: backward(other), first.step, second.step),
            first.step,
        )


def test_after_close(model: nn.Module) -> None:
    with paceline.join() as world:
        loader = paceline.loader(samples(), BATCH, world)
    for use in (
        lambda: bound(world, model),
        lambda: next(iter(loader)),
        lambda: world.total(torch.ones(1)),
        lambda: world.evaluation(loader),
        lambda: paceline.loader(samples(), BATCH, world),
    ):
        with pytest.raises(
            ConfigError, match=r"after world.close\(\): call paceline.join\(\) again"
        ):
            use()


def test_an_evaluation_of_something_else(world: World, model: nn.Module) -> None:
    bound(world, model)
    train = paceline.loader(samples(), BATCH, world)
    test = paceline.loader(samples(), BATCH, world, train=False)
    with pytest.raises(ConfigError, match=r"got the training loader: pass .* with train=False"):
        world.evaluation(train)
    with pytest.raises(ConfigError, match=r"got list: pass a paceline.loader\(\)"):
        world.evaluation([1])
    next(iter(train))
    with (
        pytest.raises(ConfigError, match=r"world.evaluation\(\) was called inside a step"),
        world.step(),
    ):
        world.evaluation(test)


def test_an_unknown_way_to_exchange(world: World, model: nn.Module) -> None:
    with pytest.raises(
        ConfigError, match="sync is 'ring'; it must be one of auto, allreduce, notified"
    ):
        paceline.parallelize(model, sgd(model), world, sync="ring")
    for sync in (None, 3, paceline.Average, paceline.DiLoCo()):
        with pytest.raises(ConfigError, match=r"^sync is .+; it must be a text, a paceline.Ave"):
            paceline.parallelize(model, sgd(model), world, sync=sync)
    with pytest.raises(ConfigError, match=r"^wire is None; it must be a text\.$"):
        paceline.parallelize(model, sgd(model), world, sync="average", wire=None)
    with pytest.raises(ConfigError, match="wire is 'fp8'; it must be one of fp32, bf16, int8"):
        paceline.parallelize(model, sgd(model), world, wire="fp8")
    with pytest.raises(ConfigError, match=r"^wire int8 needs sync notified"):
        paceline.parallelize(model, sgd(model), world, sync="allreduce", wire="int8")
    with pytest.raises(
        ConfigError, match="update is 'here'; it must be one of replicated, sharded"
    ):
        paceline.parallelize(model, sgd(model), world, update="here")
    with pytest.raises(ConfigError, match=r"^update sharded needs sync notified"):
        paceline.parallelize(model, sgd(model), world, sync="allreduce", update="sharded")
    with pytest.raises(ConfigError, match=r"^bucket_mb -1"):
        paceline.parallelize(model, sgd(model), world, bucket_mb=-1)


def test_narrow_parameters_where_they_cannot_be(world: World, model: nn.Module) -> None:
    narrow: Any = {"update": "sharded", "param_dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="param_dtype is 'int4'; it must be one of float32, bfl"):
        paceline.parallelize(model, sgd(model), world, param_dtype="int4")
    with pytest.raises(ConfigError, match=r"^param_dtype bfloat16: needs update sharded .* add"):
        paceline.parallelize(model, sgd(model), world, param_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"^wire int8: gradients are sent in param_dtype bfloat"):
        paceline.parallelize(model, sgd(model), world, wire="int8", **narrow)
    half = [torch.optim.SGD([p]) for p in [*model.parameters()][:2]]
    with pytest.raises(ConfigError, match=r"^param_dtype was given with several models or opti"):
        paceline.parallelize(model, half, world, **narrow)
    with pytest.raises(ConfigError, match=r"^param_dtype bfloat16 makes .* but .* is float64: lea"):
        paceline.parallelize(model, sgd(model), world, **narrow)
    optimizer = sgd(model.float())
    paceline.parallelize(model, optimizer, world, update="sharded", param_dtype="float16")
    scaler = torch.amp.GradScaler("cpu")
    with world.step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(samples()[:2][0].float()).float().sum()
        scaler.scale(loss).backward()
        with pytest.raises(ConfigError, match=r"^a GradScaler is used with param_dtype='float16'"):
            scaler.unscale_(optimizer)
        optimizer.step()


def test_what_changes_nothing_on_one_machine_is_told(
    world: World, model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    paceline.parallelize(model, sgd(model), world, sync="notified", wire="int8", connections=4)
    what = "has no effect on one machine, because its workers use shared memory; it applies to"
    assert capsys.readouterr().err.splitlines() == [
        f"paceline: {flag} {what} traffic between machines."
        for flag in ("wire int8", "connections 4")
    ]


def test_what_gpus_cannot_do(
    world: World, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "device", torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"^update sharded .*update replicated.*device='cpu'"):
        paceline.parallelize(model, sgd(model), world, update="sharded")
    with pytest.raises(ConfigError, match=r"^wire int8 needs sync notified, .*sync notified, or"):
        paceline.parallelize(model, sgd(model), world, wire="int8")


def test_an_optimizer_of_another_model(world: World, model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="none of the model's parameters"):
        paceline.parallelize(model, sgd(network()), world)


def test_lbfgs(world: World, model: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ConfigError, match="LBFGS"):
        paceline.parallelize(model, optimizer, world)


def test_servers_of_a_process_that_was_started_alone(world: World, model: nn.Module) -> None:
    with pytest.raises(ConfigError) as caught:
        paceline.parallelize(model, sgd(model), world, sync="server:servers=2")
    assert str(caught.value) == (
        "sync server: this process was started alone, so that no parameter server can find it; "
        "start the script with paceline launch -n 1 --num_servers 2 -- python SCRIPT, or with "
        "another launcher."
    )


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.LBFGS])
def test_an_optimizer_that_servers_cannot_divide(world: World, kind: Any) -> None:
    model = nn.Linear(2, 2, bias=False)
    with pytest.raises(ConfigError, match=f"^sync server does not support {kind.__name__}, "):
        paceline.parallelize(model, kind(model.parameters()), world, sync="server")


def test_a_model_elsewhere(world: World) -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(ConfigError, match=r"parameter weight without values"):
        paceline.parallelize(model, sgd(model), world)


def test_a_model_that_is_one_batch_norm(world: World) -> None:
    model = nn.BatchNorm1d(3)
    with pytest.raises(ConfigError, match=r"nn\.Sequential"):
        paceline.parallelize(model, sgd(model), world)


class RenormalisedTable(nn.Module):
    """A table that its module renormalises by torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, 4))

    def forward(self, index: Tensor) -> Tensor:
        return nn.functional.embedding(index, self.table, max_norm=1.0).sum()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_renormalises_its_table(world: World, kind: Any) -> None:
    model = nn.Sequential(kind(6, 4, max_norm=1.0), nn.Linear(4, 1))
    with pytest.raises(
        ConfigError, match=r"^the model's 0 has max_norm=1\.0.*max_norm=None.*renorm_"
    ):
        bound(world, model)
    bound(world, nn.Sequential(kind(6, 4), nn.Linear(4, 1)))  # the remedy


def test_a_table_that_a_function_renormalises(world: World) -> None:
    model = RenormalisedTable()
    bound(world, model)
    with pytest.raises(ConfigError, match=r"^RenormalisedTable calls embedding\(\) with max_norm"):
        in_step(world, lambda: model(torch.tensor([0, 1])))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_whose_gradient_depends_on_counts(world: World, kind: Any) -> None:
    model = nn.Sequential(kind(6, 4, scale_grad_by_freq=True), nn.Linear(4, 1))
    with pytest.raises(ConfigError, match=r"^the model's 0 has scale_grad_by_freq=True, which div"):
        bound(world, model)


class CountedTable(nn.Module):
    """A table whose gradient is divided by counts, in a call of a function."""

    def __init__(self, *, bag: bool) -> None:
        super().__init__()
        self.table, self.bag = nn.Parameter(torch.ones(6, 4)), bag

    def forward(self, index: Tensor) -> Tensor:
        function = nn.functional.embedding_bag if self.bag else nn.functional.embedding
        return function(index, self.table, scale_grad_by_freq=True).sum()


@pytest.mark.parametrize("bag", [False, True])
def test_a_function_whose_gradient_depends_on_counts(world: World, bag: bool) -> None:
    model = CountedTable(bag=bag)
    bound(world, model)
    with pytest.raises(ConfigError, match=r"^CountedTable calls embedding\(\) with scale_grad"):
        in_step(world, lambda: model(torch.tensor([[0, 1, 1]])))


def test_a_sparse_buffer(world: World) -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match=r"^the model has a buffer graph of layout torch\.sparse"):
        bound(world, model)


def test_a_sparse_parameter(world: World) -> None:
    model = nn.Linear(3, 3)
    model.register_parameter("graph", nn.Parameter(torch.eye(3).to_sparse()))
    with pytest.raises(ConfigError, match=r"^the model has a parameter graph of layout torch\.s"):
        bound(world, model)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("sync", ["auto", "average"])
@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.LazyLinear, "weight"),
        (nn.LazyConv2d, "weight"),
        (nn.LazyBatchNorm1d, "running_mean"),  # it has no parameters
    ],
)
def test_a_lazy_module(world: World, layer: Any, name: str, sync: str) -> None:
    options: dict[str, Any] = {
        nn.LazyConv2d: {"out_channels": 2, "kernel_size": 1},
        nn.LazyLinear: {"out_features": 2},
        nn.LazyBatchNorm1d: {"affine": False},
    }[layer]
    model = nn.Sequential(nn.Linear(2, 2), layer(**options))
    with pytest.raises(
        ConfigError, match=rf"^the model's 1\.{name} is uninitialised \(lazy\): run"
    ):
        paceline.parallelize(model, sgd(model), world, sync=sync)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("sync", ["auto", "average"])
@pytest.mark.parametrize("way", ["fully_shard", "distribute_module"])
def test_a_module_of_parts(world: World, mesh: Any, way: str, sync: str) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3))
    if way == "fully_shard":
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    else:
        model = torch.distributed.tensor.distribute_module(model, mesh)
    with pytest.raises(
        ConfigError, match=r"^the model's 0\.weight is a DTensor, .*fully_shard\(\), tensor para"
    ):
        paceline.parallelize(model, sgd(model), world, sync=sync)


def test_parameters_of_parts_that_the_optimizer_alone_has(world: World, mesh: Any) -> None:
    model = nn.Linear(3, 3)
    part = nn.Parameter(torch.distributed.tensor.distribute_tensor(torch.ones(2), mesh))
    optimizer = torch.optim.SGD([*model.parameters(), part], lr=0.1)
    with pytest.raises(ConfigError, match=r"shape \(2,\), not the model's, is a DTensor"):
        paceline.parallelize(model, optimizer, world)


def test_a_module_that_is_divided_later(world: World, mesh: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 3)).double()
    optimizer = bound(world, model)
    in_step(world, lambda: backward(model), optimizer.step)
    part = nn.Parameter(torch.distributed.tensor.distribute_tensor(torch.ones(3), mesh))
    model[0].bias = part
    optimizer.add_param_group({"params": [part]})
    with pytest.raises(ConfigError, match=r"^0\.bias is a DTensor"):
        in_step(world)


@pytest.mark.parametrize("name", ["weight", "mask"])
def test_a_tensor_whose_elements_share_memory(world: World, name: str) -> None:
    """As in https://github.com/pytorch/pytorch/issues/68407: no broadcast can write it."""
    model = nn.Linear(3, 3)
    expanded = torch.ones(1, 3).expand(3, 3)
    if name == "weight":
        model.weight = nn.Parameter(expanded)
    else:
        model.register_buffer("mask", expanded)
    model.register_buffer("places", torch.arange(3).expand(1, -1))  # in memory of their own
    with pytest.raises(ConfigError, match=rf"^(the model's )?{name} has elements that share mem"):
        bound(world, model)


def test_a_tensor_of_other_tensors(world: World) -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("scales", TwoTensor(torch.ones(3), torch.ones(3)))  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match=r"^the model's scales is a TwoTensor, which is made of"):
        bound(world, model)


@pytest.mark.parametrize("inside", [False, True])
def test_a_module_that_exchanges_by_itself(world: World, mesh: Any, inside: bool) -> None:
    wrapped: nn.Module = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    model, name = (nn.Sequential(wrapped), "the model's 0") if inside else (wrapped, "the model")
    with pytest.raises(ConfigError, match=rf"^{name} is wrapped in DistributedDataParallel, which"):
        bound(world, model)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_torchscript_module(world: World, how: str, inside: bool) -> None:
    layer: Any = nn.Linear(6, 3)
    compiled = torch.jit.script(layer) if how == "script" else torch.jit.trace(layer, torch.ones(6))  # type: ignore[no-untyped-call]
    model, name = (nn.Sequential(compiled), "the model's 0") if inside else (compiled, "the model")
    with pytest.raises(
        ConfigError, match=rf"^{name} is a TorchScript module.*torch\.jit\.trace\(\)"
    ):
        bound(world, model)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripting_a_model_that_is_trained(world: World) -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    bound(world, model)
    with pytest.raises(AttributeError, match=r"after paceline\.parallelize\(\).*jit\.trace\(\)"):
        torch.jit.script(model)
    x = torch.ones(2, 6)
    traced = torch.jit.trace(model, x)  # type: ignore[no-untyped-call]
    fresh = nn.Sequential(nn.Linear(6, 3))
    fresh.load_state_dict(model.state_dict())
    for remedy in (traced, torch.jit.script(fresh)):
        assert torch.equal(remedy(x), model(x))


def test_an_update_outside_of_a_step(world: World, model: nn.Module) -> None:
    optimizer = bound(world, model)
    backward(model)
    with pytest.raises(ConfigError, match=r"outside a step, or twice.*with world.step\(\):"):
        optimizer.step()


def test_two_updates_in_a_step(world: World, model: nn.Module) -> None:
    optimizer = bound(world, model)
    with pytest.raises(ConfigError, match="outside a step, or twice"):
        in_step(world, lambda: backward(model), optimizer.step, optimizer.step)


def test_a_gradient_is_written_by_an_alias(world: World, model: nn.Module) -> None:
    optimizer, p = bound(world, model), next(model.parameters())

    def write() -> None:
        with torch._C.DisableTorchFunctionSubclass():
            assert p.grad is not None
            p.grad.mul_(2)

    with pytest.raises(ConfigError, match=r"was modified between.*reduce\(\)"):
        in_step(world, lambda: backward(model), write, optimizer.step)


def test_two_backwards_after_a_step_with_one(world: World, model: nn.Module) -> None:
    optimizer = bound(world, model)
    in_step(world, lambda: backward(model), optimizer.step)
    with pytest.raises(ConfigError, match=r"accumulated twice.*no_sync\(\)"):
        in_step(world, lambda: backward(model), lambda: backward(model))


def test_a_step_in_a_step(world: World, model: nn.Module) -> None:
    bound(world, model)
    with (
        pytest.raises(ConfigError, match=r"world.step\(\) was called inside a step"),
        world.step(),
        world.step(),
    ):
        pass


def test_a_step_after_an_error_in_one(world: World, model: nn.Module) -> None:
    bound(world, model)
    with pytest.raises(ZeroDivisionError):
        in_step(world, lambda: 1 / 0)
    with pytest.raises(ConfigError, match=r"after an error inside a step.*join again"):
        in_step(world)


@pytest.mark.parametrize("look", [False, True])
def test_an_update_before_an_error_in_a_step_stays(model: nn.Module, look: bool) -> None:
    plain = copy.deepcopy(model)
    of_plain = sgd(plain)
    backward(plain)
    of_plain.step()
    with paceline.join() as world:
        optimizer = bound(world, model)

        def fail() -> None:
            raise ValueError("logging failed")

        with pytest.raises(ValueError, match="logging failed"):
            in_step(world, lambda: backward(model), optimizer.step, fail)
        if look:
            next(model.parameters()).norm()
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=0, atol=1e-12)


def test_a_total_while_gradients_travel(world: World, model: nn.Module) -> None:
    optimizer = bound(world, model)
    with world.step():
        backward(model)
        with pytest.raises(ConfigError, match=r"call it after optimizer.step\(\)"):
            world.total(torch.ones(1))
        optimizer.step()
        assert world.total(torch.tensor([True, False])).tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.bool])
def test_a_total_of_small_integers_does_not_wrap(world: World, dtype: torch.dtype) -> None:
    assert world.total(torch.ones(2, dtype=dtype)).dtype is torch.int64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_of_half_precision_is_neither_infinite_nor_rounded(
    world: paceline.World, dtype: torch.dtype
) -> None:
    assert world.total(torch.ones(2, dtype=dtype)).dtype is torch.float32


def test_a_total_of_a_number(world: World) -> None:
    with pytest.raises(ConfigError, match=r"got int 3: pass a tensor, such as torch.tensor\(3\)"):
        world.total(3)  # type: ignore[arg-type]


def test_a_step_without_a_batch(world: World, model: nn.Module) -> None:
    bound(world, model)
    loader = paceline.loader(samples(), BATCH, world)
    for _ in loader:
        with world.step():
            backward(model)
        with pytest.raises(ConfigError, match=r"without a batch.*once for each batch"):
            in_step(world)
        break


def test_batches_that_nobody_trains(world: World) -> None:
    loader = paceline.loader(samples(), BATCH, world)
    with pytest.raises(ConfigError, match=r"5 batches that no world.step\(\).*train=False"):
        list(loader)


@pytest.mark.parametrize("count", [0, -1])
def test_samples_that_cannot_be(world: World, model: nn.Module, count: int) -> None:
    bound(world, model)
    with pytest.raises(ConfigError, match=rf"^samples is {count}"), world.step(samples=count):
        pass


def test_two_loaders_that_train(world: World) -> None:
    paceline.loader(samples(), BATCH, world)
    with pytest.raises(ConfigError, match="pass train=False"):
        paceline.loader(samples(), BATCH, world)


def test_a_loader_after_steps_without_one(world: World, model: nn.Module) -> None:
    optimizer = bound(world, model)
    with world.step():
        backward(model)
        optimizer.step()
    with pytest.raises(ConfigError, match="1 step without a loader"):
        paceline.loader(samples(), BATCH, world)


@pytest.mark.parametrize(
    ("dataset", "batch_size", "sentence"),
    [
        (iter([1, 2]), 4, r"map-style.*your own DataLoader.*world\.step\(samples=n\)"),
        (DataLoader([1, 2]), 4, r"DataLoader makes its own .* pass its data set \(loader\.dataset"),
        ([], 4, "empty"),
        ([1, 2], 0, "batch_size is 0: pass a whole number of samples, at least 1, of all ranks"),
        ([1, 2], 1.5, r"batch_size is 1\.5: pass a whole number"),
        ([1, 2], "2", r"batch_size is '2': pass a whole number"),
    ],
    ids=["iterator", "loader", "empty", "batch of none", "batch of halves", "text"],
)
def test_data_that_cannot_be_shared_out(
    world: World, dataset: Any, batch_size: Any, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        paceline.loader(dataset, batch_size, world)


def test_a_batch_size_of_numpys(world: World) -> None:
    assert len(list(paceline.loader(samples(), np.int64(BATCH), world, train=False))) > 1


def test_arguments_in_another_order(world: World, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"loader\(\) got int as world=: pass the world that"):
        paceline.loader(samples(), world, BATCH)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="got SGD as its model: pass the model, its optimizer"):
        paceline.parallelize(optimizer, model, world)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="got str as its model"):
        paceline.parallelize("net", optimizer, world)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"parallelize\(\) got NoneType as world="):
        paceline.parallelize(model, optimizer, None)  # type: ignore[arg-type]


def test_a_model_in_data_parallel(world: World, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"wrapped in DataParallel, .* pass the unwrapped module"):
        paceline.parallelize(nn.DataParallel(model), optimizer, world)


def test_a_device_that_torch_does_not_know() -> None:
    with pytest.raises(ConfigError, match="device is 'gpu'; supported devices are cpu and cuda"):
        paceline.join(device="gpu")


def test_a_checkpoint_without_a_run(world: World, model: nn.Module) -> None:
    bound(world, model)
    with pytest.raises(ConfigError, match=r"needs a run folder.*run="):
        world.checkpoint()


def test_a_checkpoint_in_a_step(tmp_path: Path, model: nn.Module) -> None:
    with paceline.join(tmp_path / "run") as world:
        bound(world, model)
        with world.step(), pytest.raises(ConfigError, match="inside a step"):
            world.checkpoint()


class Odd:
    """Has a state that no checkpoint can keep."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [1, Counter({"a": {2}})]}

    def load_state_dict(self, state: Any) -> None: ...


def test_tracking_what_has_no_state(world: World) -> None:
    with pytest.raises(ConfigError, match="int is a int, which has no state_dict"):
        world.track(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"odd\['seen'\]\[1\]\['a'\] is a builtins.set"):
        world.track(odd=Odd())


def test_tracking_a_name_twice_or_too_late(world: World, model: nn.Module) -> None:
    optimizer = bound(world, model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    world.track(rate=schedule)
    with pytest.raises(ConfigError, match="rate is already tracked"):
        world.track(rate=schedule)
    with world.step():
        backward(model)
        optimizer.step()
    with pytest.raises(ConfigError, match="after the first step"):
        world.track(schedule)


def test_what_exchanges_in_each_step_is_refused_where_weights_are_averaged(world: World) -> None:
    model = network()
    with pytest.raises(ConfigError, match=r"^sync_bn was given, but with sync average"):
        paceline.parallelize(model, sgd(model), world, sync="average", sync_bn=True)


def test_torchs_sync_batch_norm_becomes_ours_with_a_line(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.SyncBatchNorm(4))
    bound(world, model)
    assert [type(layer) for layer in model[1:]] == [SyncBatchNorm] * 2
    assert "(1 and 1 more layer) normalises by the global batch" in capsys.readouterr().err


def test_torchs_sync_batch_norm_with_averaging(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    with pytest.raises(ConfigError, match=r"^1 is a SyncBatchNorm, but with sync average"):
        paceline.parallelize(model, sgd(model), world, sync="average")


def test_an_unknown_way_with_buffers(world: World, model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"^buffers is 'sum'; it must be one of broadcast, local"):
        paceline.parallelize(model, sgd(model), world, buffers="sum")
    with pytest.raises(ConfigError, match=r"^update sharded needs sync notified: with average"):
        paceline.parallelize(model, sgd(model), world, sync="average", update="sharded")
    with pytest.raises(ConfigError, match=r"^average_every 0|^every 0: must be at least 1 step"):
        paceline.parallelize(model, sgd(model), world, sync="average:every=0")
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    with pytest.raises(ConfigError, match=r"averages the weights of one model that one optimizer"):
        paceline.parallelize([model], optimizers, world, sync="average")
    paceline.parallelize(model, sgd(model), world, sync="average:every=2")
    with pytest.raises(ConfigError, match=r"reduce\(\) was called, but with sync=\"average\""):
        world.reduce()
    other = network()
    with pytest.raises(ConfigError, match=r"several optimizers"):
        paceline.parallelize(other, sgd(other), world)


def test_parameters_that_are_frozen_later_are_refused_where_weights_are_averaged(
    world: World, model: nn.Module
) -> None:
    optimizer = paceline.parallelize(model, sgd(model), world, sync="average")[1]
    in_step(world, lambda: backward(model), optimizer.step)
    next(model.parameters()).requires_grad_(requires_grad=False)
    with pytest.raises(ConfigError, match=r"^the optimizer trains other parameters than at the"):
        in_step(world, lambda: backward(model), optimizer.step)


def test_the_last_steps_that_no_merge_has_are_noted(
    model: nn.Module, capfd: pytest.CaptureFixture[str]
) -> None:
    for merges in (False, True):
        with paceline.join() as world:
            optimizer = paceline.parallelize(model, sgd(model), world, sync="average:every=5")[1]
            for _ in range(7):
                in_step(world, lambda: backward(model), optimizer.step, optimizer.zero_grad)
            if merges:
                world.merge()
        noted = "call world.merge() after the last step" in capfd.readouterr().err
        assert noted is not merges
