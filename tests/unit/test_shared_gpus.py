"""Several ranks on one GPU: what travels without NCCL, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.communicator import Communicator
from paceline.comm.shared_gpus import sharing_ranks
from paceline.comm.single_rank import SingleRankCommunicator
from paceline.config.world import SyncConfig
from paceline.errors import ConfigError
from paceline.generation import context as context_module
from paceline.generation.run import Run
from paceline.replica.trained_parameters import TrainedParameters
from paceline.session.checks import check
from paceline.wiring.candidates import candidates_of
from paceline.wiring.connections import adds_up_on_gpus
from paceline.wiring.exchange import ExchangeGroups
from tests.harness.processes.worlds import open_context, run_of, world_of
from tests.unit.test_wiring import config_of

GPU = torch.device("cuda", 0)
REFUSED = (
    "--sync allreduce: ranks 0 and 1 compute on one GPU, and NCCL connects one rank a GPU; use "
    "--sync notified or average, or give each rank its own GPU."
)


@pytest.mark.parametrize(
    ("gpus", "sharing"),
    [
        ([], ()),
        (["a"], ()),
        (["a", "b", "c"], ()),
        (["a", "b", "a"], (0, 2)),
        (["a", "b", "b", "a", "b"], (0, 3)),
        (["a", "b", "b", "b"], (1, 2, 3)),
    ],
)
def test_ranks_share_a_gpu_where_all_machines_know_it_by_one_name(
    gpus: Sequence[str], sharing: tuple[int, ...]
) -> None:
    assert sharing_ranks(gpus) == sharing


def context_on_gpus(
    sharing: tuple[int, ...], opened: list[str], machines: tuple[int, ...] = (2,)
) -> Any:
    """Return the context of rank 0 of ranks on GPUs, which notes what NCCL connects."""

    def by_gloo(group: object, purpose: str) -> Communicator:
        opened.append(purpose)
        return SingleRankCommunicator()

    def by_nccl(group: object, purpose: str) -> Communicator:
        opened.append(f"{purpose} by NCCL")
        return SingleRankCommunicator()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_module, "find_sharing_ranks", lambda *_: sharing)
        return open_context(
            world_of(machines), by_gloo, device=GPU, limits=(5.0, 5.0), connect_gpus=by_nccl
        )


CONTROL = ["steps", "summaries"]


def model_with_rows() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("sync", "own"),
    [
        ("allreduce", ["gradients by NCCL"]),
        ("auto", ["gradients by NCCL"]),
        ("notified", []),
        ("average", []),
    ],
)
def test_nccl_carries_what_is_on_gpus_and_no_control_messages(sync: str, own: list[str]) -> None:
    opened: list[str] = []
    with Run(context=context_on_gpus((), opened)) as run:
        groups = ExchangeGroups(run, model_with_rows(), sync)
        run.open("data", "layers")
        assert groups.rows is run.context.group("data", "rows")
    assert opened == [*CONTROL, *own, "rows by NCCL", "layers by NCCL"]


@pytest.mark.parametrize("sync", ["auto", "notified", "average"])
def test_ranks_that_share_a_gpu_connect_nothing_by_nccl(sync: str) -> None:
    opened: list[str] = []
    with Run(context=context_on_gpus((0, 1), opened)) as run:
        context = run.context
        ExchangeGroups(run, model_with_rows(), sync)
        ExchangeGroups(run, model_with_rows(), sync, 0)
        for purpose in ("layers", "buffers"):
            run.open("data", purpose)
        assert context.group("data", "gradients") is context.group("data", "steps")
        assert context.group("data", "gradients/0") is context.group("data", "steps/0")
    assert opened == [*CONTROL, "rows", "steps/0", "rows/0", "layers"]


def test_each_of_several_models_has_its_own_collectives_on_gpus() -> None:
    opened: list[str] = []
    with Run(context=context_on_gpus((), opened)) as run:
        ExchangeGroups(run, nn.Linear(1, 1), "auto", 0)
        groups = ExchangeGroups(run, nn.Linear(1, 1), "notified", 1)
        assert groups.gradients == groups.steps == "steps/1"
    assert opened == [*CONTROL, "steps/0", "gradients/0 by NCCL", "steps/1"]


def test_allreduce_refuses_ranks_that_share_a_gpu_before_it_connects_them() -> None:
    opened: list[str] = []
    with Run(context=context_on_gpus((0, 1), opened)) as run:
        for index in (None, 0):
            with pytest.raises(ConfigError) as refused:
                ExchangeGroups(run, nn.Linear(1, 1), "allreduce", index)
            assert str(refused.value) == REFUSED
    assert opened == CONTROL


@pytest.mark.parametrize(
    ("machines", "sync", "sharing", "adds_up"),
    [
        ((2, 2), "notified", (), True),
        ((2, 1), "notified", (), True),
        ((1, 3), "notified", (), True),
        ((1, 1), "notified", (), False),
        ((2,), "notified", (), False),
        ((2, 2), "notified", (0, 1), False),
        ((2, 2), "auto", (), False),
    ],
)
def test_gpus_add_up_first_where_some_machine_of_several_has_more_than_one(
    machines: tuple[int, ...], sync: str, sharing: tuple[int, ...], adds_up: bool
) -> None:
    with context_on_gpus(sharing, [], machines) as context:
        assert adds_up_on_gpus(context, sync) is adds_up
        on_cpus = run_of(group=world_of(machines)).context
        assert not adds_up_on_gpus(on_cpus, sync)


def test_a_command_refuses_a_repeated_gpu_with_allreduce_before_it_starts_workers() -> None:
    with pytest.raises(ConfigError) as refused:
        check(config_of("--gpus", "0,0", "--sync", "allreduce"), gpus=1)
    assert str(refused.value) == REFUSED
    for sync in ("auto", "notified", "average"):
        check(config_of("--gpus", "0,0", "--sync", sync), gpus=1)
    check(config_of("--gpus", "0,1", "--sync", "allreduce"), gpus=2)
    assert config_of("--gpus", "0,0").world.workers == 2


def test_auto_tries_allreduce_on_gpus_that_have_one_rank_each() -> None:
    model = nn.Linear(2**20, 16)
    trained = TrainedParameters.of(model, torch.optim.SGD(model.parameters()))
    methods = [
        {one.sync for one in candidates_of(SyncConfig(), trained, (2,), GPU, sharing)}
        for sharing in ((), (0, 1))
    ]
    assert methods == [{"allreduce"}, {"notified"}]
