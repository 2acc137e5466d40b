"""Cutting a model into stages: what is refused, and by what sentence; and the choice of cuts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.api.parallelize import refuse_other_stages, undivided
from paceline.errors import ConfigError
from paceline.parallel.blocks import block_paths, cut_paths, take_part
from paceline.parallel.cuts import Cost, best_cuts, block_costs
from tests.harness.equivalence.pipelines import PipelineRank, on_ranks


def model() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 2))


def cut(given: nn.Module, stages: int = 2, batch: Any = None, **options: Any) -> list[Any]:
    """Cut a model on so many ranks, and train a batch, if there is one."""
    options = {"microbatches": 2, "cuts": ["1"], "loss": F.cross_entropy, **options}

    def run(rank: PipelineRank) -> Any:
        stage = rank.cut(given, **options)
        if batch is not None:
            rank.sync.replica = Accumulating()  # type: ignore[assignment]
            stage.train_batch(*batch)
        return sorted(stage.state_dict()), rank.said

    return on_ranks(run, stages)


class Accumulating:
    """What has nothing to exchange."""

    def no_sync(self) -> Any:
        return torch.enable_grad()


def refused(*arguments: Any, **options: Any) -> str:
    """Return the sentence with which a cut is refused."""
    with pytest.raises(ConfigError) as raised:
        cut(*arguments, **options)
    return str(raised.value)


def test_a_part_has_the_names_of_the_whole_model() -> None:
    parts = cut(model(), cuts=["1.2"])
    assert [names for names, _ in parts] == [
        ["0.bias", "0.weight", "1.0.bias", "1.0.weight"],
        ["1.2.bias", "1.2.weight", "2.bias", "2.weight"],
    ]


def test_a_whole_child_stays_the_same_object() -> None:
    whole = model()
    paths = cut_paths(block_paths(whole), ["1"])
    assert paths == [["0"], ["1.0", "1.1", "1.2", "2"]]
    assert take_part(whole, paths[1])["1"] is whole[1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cuts": ["layer3"]}, "cuts names 'layer3', where no stage can begin.* 1.0, 1.1, 1.2, 2"),
        ({"cuts": ["0"]}, "cuts names '0', where no stage can begin"),
        (
            {"cuts": ["2", "1"], "stages": 3, "microbatches": 3},
            "cuts has '1' behind '2', which isn't before it",
        ),
        ({"cuts": []}, r"cuts is \[\], but the mesh has 2 stages: give a list of the 1 block"),
        ({"cuts": "2"}, "cuts is '2', but the mesh has 2 stages: give a list"),
        ({"cuts": [2]}, r"cuts is \[2\], .* the 1 block at which .* begin, each by its name"),
        ({"cuts": None, "stages": 6, "microbatches": 6}, "6 stages, but the model has 5 blocks"),
        ({"cuts": ["1.1", "1.2"], "stages": 3, "microbatches": 3}, "stage 1 has 1, which has no"),
        ({"microbatches": 1}, "microbatches 1: must be at least the number of stages, 2.*bubble"),
        ({"microbatches": 2.5}, "microbatches 2.5: must be a whole number"),
        ({"schedule": "zigzag"}, "schedule zigzag.*gpipe, 1f1b, zb-h1"),
        ({"schedule": ["gpipe"]}, "schedule .'gpipe'.*gpipe, 1f1b, zb-h1"),
        ({"loss": None}, r"stages\(\) got NoneType as loss: pass a function of"),
        ({"cuts": None, "example": (torch.zeros(4, 4),)}, "got tuple as example: pass a tensor"),
        (
            {"cuts": None, "example": torch.zeros(4, 3)},
            r"The model failed with RuntimeError.*call the model with torch.zeros\(2, 3\)",
        ),
        ({"blocks": ["0", "5"]}, "blocks names '5', which is no child of the model"),
    ],
)
def test_a_cut_that_breaks_a_rule_is_refused(options: dict[str, Any], sentence: str) -> None:
    assert re.search(sentence, refused(model(), **options))


@pytest.mark.parametrize(
    ("mesh", "sentence"),
    [
        (["stage"], r'must be a dictionary of axes and their lengths; give {"stage": 2}'),
        ({"stage": 0}, "length of an axis must be a whole number of at least 1; change 'stage'"),
        ({"data": 2}, "its axes are stage and tensor; the rest of the world is data; leave out"),
        ({"stage": 2}, "a replica takes 2 processes, which don't divide the 1 of this world"),
    ],
)
def test_a_mesh_that_breaks_a_rule_is_refused(mesh: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        paceline.join(mesh=mesh)


@pytest.mark.parametrize(
    ("axis", "sentence"),
    [
        ("stage", "mesh has the axis 'stage' of 2 ranks, which .* pass it to paceline.stages()"),
        ("tensor", "mesh has the axis 'tensor' of 2 ranks, .* to paceline.tensor_parallel()"),
    ],
)
def test_a_whole_model_in_a_mesh_is_named(axis: str, sentence: str) -> None:
    (note,) = undivided([model()], {"data": 1, "stage": 1, "tensor": 1} | {axis: 2})
    assert re.match(sentence, note)
    assert [*undivided([model()], {"data": 2, "stage": 1, "tensor": 1})] == []


def test_an_optimizer_of_the_whole_model_is_refused() -> None:
    whole = model()

    def run(rank: PipelineRank) -> None:
        stage = rank.cut(whole, F.cross_entropy, microbatches=2, cuts=["1"])
        own = {*stage.parameters()}
        assert [*undivided([whole, stage], {"stage": 2, "tensor": 1})] == []
        refuse_other_stages([stage], own, torch.optim.SGD([*own], lr=0.1))
        refuse_other_stages([whole], own, torch.optim.SGD(whole.parameters(), lr=0.1))
        refuse_other_stages([stage], own, torch.optim.SGD([*own, *whole.parameters()], lr=0.1))

    with pytest.raises(ConfigError, match="the optimizer has 8 parameters that this rank's stage"):
        on_ranks(run, 2)


def test_a_compiled_model_is_refused() -> None:
    in_place = model()
    in_place.compile(backend="eager")
    with paceline.join() as world:
        for compiled in (torch.compile(model(), backend="eager"), in_place):
            with pytest.raises(ConfigError, match="a compiled model, whose blocks can't be told"):
                paceline.stages(compiled, world, loss=F.cross_entropy, microbatches=2)


class Between(nn.Module):
    """A model whose forward does something between its children."""

    def __init__(self, extra: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.extra == "relu":
            return self.second(F.relu(y))
        if self.extra == "skips":
            return self.second(x)
        if self.extra == "twice":
            return self.second(self.second(y))
        return self.first(self.second(x)) if self.extra == "order" else self.second(y)


BATCH = (torch.randn(4, 4), torch.tensor([0, 1, 0, 1]))


@pytest.mark.parametrize("extra", ["relu", "skips", "twice", "order"])
def test_a_model_that_isnt_its_blocks_one_after_the_other_is_found_out(extra: str) -> None:
    sentence = refused(Between(extra), batch=BATCH, cuts=["second"])
    assert "the model isn't its blocks one after the other" in sentence
    cut(Between(""), batch=BATCH, cuts=["second"])


class NoTensors(nn.Module):
    """A block that returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return {"x": self.linear(x)} if isinstance(x, Tensor) else self.linear(x["x"])


def test_a_stage_that_returns_no_tensors_is_refused() -> None:
    sentence = refused(nn.Sequential(NoTensors(), NoTensors()), batch=BATCH)
    assert "stage 0 returns dict, but only a tensor or a tuple of tensors travels" in sentence


def test_stages_with_different_batches_are_refused() -> None:
    def run(rank: PipelineRank) -> None:
        stage = rank.cut(model(), F.cross_entropy, microbatches=2, cuts=["1"])
        size = 4 if rank.run.leads else 3
        stage(torch.randn(size, 4))

    with pytest.raises(ConfigError, match=r"model\(x\) got torch.float32 of shape \(\d, 4\)"):
        on_ranks(run, 2)


def test_what_has_no_row_for_each_sample_is_refused() -> None:
    x, y = BATCH
    others: Any = [(x, [0, 1, 0, 1]), ({"x": x}, y), (x, torch.tensor(1)), (x[:0], y[:0])]
    for batch in others:
        assert "pass a tensor with a row for each sample" in refused(model(), batch=batch)


def test_a_loss_that_isnt_one_number_is_refused() -> None:
    sentence = refused(model(), batch=BATCH, loss=lambda x, y: x)
    assert "loss= returned what isn't one number" in sentence


def test_a_model_that_needs_values_is_refused() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 0 else -x

    sentence = refused(nn.Sequential(nn.Linear(4, 4), Reads(), nn.Linear(4, 2)), batch=BATCH)
    assert "on the meta device, where the shapes between its stages are computed" in sentence


def test_an_error_without_a_text_is_named_by_its_class() -> None:
    class Refuses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    sentence = refused(nn.Sequential(nn.Linear(4, 4), Refuses(), nn.Linear(4, 2)), batch=BATCH)
    assert "stages are computed: ValueError;" in sentence


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    costs = [Cost(3, 1), Cost(1, 1), Cost(1, 1), Cost(4, 1), Cost(1, 9)]
    assert best_cuts(costs, 2) == (3,)
    assert best_cuts(costs, 3) == (2, 4)
    assert best_cuts(costs, 5) == (1, 2, 3, 4)


def test_bytes_decide_between_cuts_that_are_as_fast() -> None:
    costs = [Cost(1, 5), Cost(0, 1), Cost(0, 9), Cost(1, 1)]
    assert best_cuts(costs, 2) == (2,)


def test_each_stage_has_parameters_where_it_can() -> None:
    assert best_cuts([Cost(0, 9), Cost(0, 0), Cost(0, 1), Cost(0, 1)], 3) == (1, 3)
    assert best_cuts([Cost(0, 1), Cost(0, 0)], 2) == (1,)


class Last(nn.Module):
    """A block that returns the last output of a recurrent network."""

    def forward(self, found: tuple[Tensor, Any]) -> Tensor:
        return found[0][:, -1]


def test_blocks_that_write_in_place_or_return_more_than_tensors_are_timed() -> None:
    layers = (nn.LSTM(4, 4, batch_first=True), Last(), nn.ReLU(inplace=True), nn.Linear(4, 2))
    given = nn.Sequential(*layers)
    costs = block_costs(given, block_paths(given), {}, torch.randn(8, 3, 4))
    assert [cost.travels for cost in costs] == [False, True, True, True]
    assert best_cuts(costs, 2) != (1,)
    assert all(cost.seconds > 0 for cost in costs)


def test_the_choice_is_printed_once_with_its_figures() -> None:
    x = torch.randn(8, 4)
    before = model()
    state = {name: value.clone() for name, value in before.state_dict().items()}
    parts = cut(before, cuts=None, example=x)
    (sentence,) = next(said for _, (*said,) in parts if said)
    assert re.fullmatch(
        r"cuts by measured time: stage 0 0.0 MiB and \d+.\d ms a microbatch, "
        r"stage 1 .* ms a microbatch. Pin this choice with cuts=\['.*'\].",
        sentence,
    )
    assert all(torch.equal(before.state_dict()[name], value) for name, value in state.items())


def test_a_resumed_run_has_the_cuts_that_it_began_with(tmp_path: Path) -> None:
    def choose(given: nn.Module, example: Tensor | None) -> tuple[list[str], str]:
        def run(rank: PipelineRank) -> tuple[list[str], list[str]]:
            rank.folder = tmp_path
            stage = rank.cut(given, F.cross_entropy, microbatches=2, example=example)
            return sorted(stage.state_dict()), rank.said

        (first, said), _ = on_ranks(run, 2)
        return first, said[0]

    last_is_large = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 99))
    parts, sentence = choose(last_is_large, None)
    assert parts == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert sentence.startswith("cuts by parameters' bytes: ")
    first_is_large = nn.Sequential(nn.Linear(4, 99), nn.Linear(99, 4), nn.Linear(4, 4))
    parts, sentence = choose(first_is_large, torch.randn(4, 4))
    assert parts == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert sentence == "cuts=['2'], as at the first start of this run (cuts.toml in its folder)."
    shorter = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert choose(shorter, None)[1].startswith("cuts by parameters' bytes: ")


def test_timing_changes_neither_state_nor_random_numbers() -> None:
    norm = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    torch.manual_seed(5)
    block_costs(norm, block_paths(norm), {}, torch.randn(8, 4))
    assert norm[0].num_batches_tracked == 0
    drawn = torch.rand(1)
    torch.manual_seed(5)
    torch.randn(8, 4)
    assert torch.equal(drawn, torch.rand(1))
