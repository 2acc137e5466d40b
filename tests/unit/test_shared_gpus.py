"""Several ranks on one GPU: what travels without NCCL, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from paceline import wiring
from paceline.comm.communicator import Communicator
from paceline.comm.shared_gpus import sharing_ranks
from paceline.comm.single_rank import SingleRankCommunicator
from paceline.config.world import SyncConfig
from paceline.errors import ConfigError
from paceline.generation import context as context_module
from paceline.generation.context import GenerationContext
from paceline.replica.trained_parameters import TrainedParameters
from paceline.wiring.candidates import candidates_of
from paceline.wiring.connections import connect_exchange, connect_replica, has_collectives
from tests.harness.processes.worlds import world_of
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


def context_on_gpus(sharing: tuple[int, ...], opened: list[str], size: int = 2) -> Any:
    """Return the context of rank 0 of ranks on GPUs, which notes what NCCL connects."""

    def by_gloo(group: object, purpose: str) -> Communicator:
        opened.append(purpose)
        return SingleRankCommunicator()

    def by_nccl(group: object, purpose: str) -> Communicator:
        opened.append(f"{purpose} by NCCL")
        return SingleRankCommunicator()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_module, "find_sharing_ranks", lambda *_: sharing)
        return GenerationContext(
            world_of((size,)), by_gloo, device=GPU, limits=(5.0, 5.0), connect_gpus=by_nccl
        )


CONTROL = ["steps", "summaries"]


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
    with context_on_gpus((), opened) as context:
        connect_exchange(context, GPU, sync)
        context.connect_layers()
        context.connect_rows()
    assert opened == [*CONTROL, *own, "layers by NCCL", "rows/0 by NCCL"]


@pytest.mark.parametrize("sync", ["auto", "notified", "average"])
def test_ranks_that_share_a_gpu_connect_nothing_by_nccl(sync: str) -> None:
    opened: list[str] = []
    with context_on_gpus((0, 1), opened) as context:
        connect_exchange(context, GPU, sync)
        connect_replica(context, GPU, sync)
        context.connect_layers()
        context.connect_rows()
        assert context.links(None).gradients is context.communicator
    assert opened == [*CONTROL, "replica/0", "layers", "rows/0"]


def test_each_of_several_models_has_its_own_collectives_on_gpus() -> None:
    opened: list[str] = []
    with context_on_gpus((), opened) as context:
        connect_replica(context, GPU, "auto")
        connect_replica(context, GPU, "notified")
    assert opened == [*CONTROL, "replica/0", "replica/0/gradients by NCCL", "replica/1"]


def test_allreduce_refuses_ranks_that_share_a_gpu_before_it_connects_them() -> None:
    opened: list[str] = []
    with context_on_gpus((0, 1), opened) as context:
        for connect in (connect_exchange, connect_replica):
            with pytest.raises(ConfigError) as refused:
                connect(context, GPU, "allreduce")
            assert str(refused.value) == REFUSED
    assert opened == CONTROL


def test_a_command_refuses_a_repeated_gpu_with_allreduce_before_it_starts_workers() -> None:
    with pytest.raises(ConfigError) as refused:
        wiring.check(config_of("--gpus", "0,0", "--sync", "allreduce"), gpus=1)
    assert str(refused.value) == REFUSED
    for sync in ("auto", "notified", "average"):
        wiring.check(config_of("--gpus", "0,0", "--sync", sync), gpus=1)
    wiring.check(config_of("--gpus", "0,1", "--sync", "allreduce"), gpus=2)
    assert config_of("--gpus", "0,0").world.workers == 2


def test_auto_tries_allreduce_on_gpus_that_have_one_rank_each() -> None:
    model = nn.Linear(2**20, 16)
    trained = TrainedParameters.of(model, torch.optim.SGD(model.parameters()))
    methods = [
        {one.sync for one in candidates_of(SyncConfig(), trained, (2,), GPU, sharing)}
        for sharing in ((), (0, 1))
    ]
    assert methods == [{"allreduce"}, {"notified"}]
    assert has_collectives((), GPU, "auto")
    assert not has_collectives((0, 1), GPU, "auto")
