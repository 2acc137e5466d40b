"""What the blocks of a pipeline may do: results of one process, or a sentence that refuses them."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import CommError, ConfigError
from tests.contract.test_pipeline import SCHEDULES, WIDTH, batches, mlp, require_equal
from tests.harness.equivalence.pipelines import PipelineRank, on_ranks


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_stage_may_begin_with_an_operation_in_place(schedule: str, checkpoints: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 3)]
    model = nn.Sequential(nn.ELU(inplace=True), *layers).double()
    data = [(x.clone(), y) for x, y in batches(8, 8)]
    options: dict[str, Any] = {"checkpoint_activations": checkpoints, "schedule": schedule}
    for x, _ in data:
        x.abs_()  # which a first block in place leaves as they are: each training gets the same
    require_equal(model, 2, data=data, microbatches=2, cuts=["2"], **options)


class Rotation(nn.Module):
    """A block that returns complex values, or gets them."""

    def __init__(self, *, back: bool) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.linspace(0.1, 0.7, WIDTH, dtype=torch.float64))
        self.back = back

    def forward(self, x: Tensor) -> Tensor:
        turned = x * torch.polar(torch.ones_like(self.angle), self.angle)
        return turned.real + 0.5 * turned.imag if self.back else turned.conj()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_complex_values_travel_with_their_gradients(schedule: str) -> None:
    model = mlp(Rotation(back=False), Rotation(back=True))
    require_equal(model, 2, microbatches=2, cuts=["9"], schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("frozen", [range(3), range(3, 6), range(6, 9)], ids=str)
def test_a_stage_may_be_frozen(schedule: str, frozen: range) -> None:
    model = mlp()
    for block in frozen:
        model[block].requires_grad_(False)
    require_equal(model, 3, microbatches=3, cuts=["3", "6"], schedule=schedule)


class Aside(nn.Module):
    """A block with a parameter on the way of its input, and beside it; and one that gets both."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.1, 0.7, WIDTH, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return x * self.scale, self.scale.exp()
        return (x[0] * x[1]) @ self.scale.outer(self.scale)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_parameter_may_have_a_way_of_its_own_to_what_a_stage_returns(checkpoints: bool) -> None:
    model = mlp(Aside(), Aside(), nn.Linear(WIDTH, WIDTH).double())
    options = {"schedule": "zb-h1", "checkpoint_activations": checkpoints}
    require_equal(model, 3, microbatches=3, cuts=["4", "9"], data=batches(9, 9), **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_stage_may_run_a_layer_twice(schedule: str, checkpoints: bool) -> None:
    layers = [*mlp()]
    model = nn.Sequential(*layers[:4], layers[2], nn.Tanh(), *layers[4:])
    options: dict[str, Any] = {"schedule": schedule, "checkpoint_activations": checkpoints}
    require_equal(model, 2, microbatches=2, cuts=["2"], data=batches(8, 8), **options)


class Counting(nn.Linear):
    """A layer with state that is no tensor."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": 3, "ranges": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        assert state["seen"] == 3


def test_the_whole_state_has_what_is_no_tensor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Counting(WIDTH, WIDTH), nn.Linear(WIDTH, 3))

    def run(rank: PipelineRank) -> dict[str, Any]:
        return rank.cut(model, F.cross_entropy, microbatches=2, cuts=["1"]).whole_state_dict()

    for state in on_ranks(run, 2):
        assert [*state] == [*model.state_dict()]
        assert state["0._extra_state"]["seen"] == 3
        copy.deepcopy(model).load_state_dict(state)


def test_the_whole_state_may_be_that_of_the_first_stage_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(3, 2))

    def run(rank: PipelineRank) -> dict[str, Any]:
        stage = rank.cut(model, F.cross_entropy, microbatches=3, cuts=["1", "2"])
        return stage.whole_state_dict(on_all=False)

    first, *others = on_ranks(run, 3)
    assert [*first] == [*model.state_dict()]
    assert all(first[name].equal(value) for name, value in model.state_dict().items())
    assert others == [{}, {}]


class Named(NamedTuple):
    """What a block returns."""

    scores: Tensor
    other: Tensor


class Names(nn.Module):
    """A block that returns a named tuple, or gets it."""

    def forward(self, x: Any) -> Any:
        return Named(x.tanh(), x) if isinstance(x, Tensor) else x.scores + x.other


def test_a_named_tuple_travels_nowhere() -> None:
    model = mlp(Names(), Names(), nn.Linear(WIDTH, WIDTH).double())
    (sentence,) = refusals(model, cuts=["9"])
    assert sentence.startswith("stage 0 returns Named, but only a tensor or a tuple of tensors")
    require_equal(model, 2, data=batches(8), microbatches=2, cuts=["10"])

    def loss(output: Named, y: Tensor) -> Tensor:
        return F.cross_entropy(output.scores, y)

    options = {"microbatches": 2, "cuts": ["4"], "loss": loss}
    require_equal(nn.Sequential(*mlp(), Names()), 2, data=batches(8), **options)


def test_a_batch_norm_evaluates_one_sample_and_trains_on_more() -> None:
    ((x, y),) = batches(4)
    model = mlp(nn.BatchNorm1d(WIDTH).double(), nn.Linear(WIDTH, WIDTH).double())
    expected = model.eval()(x)
    model.train()

    def run(rank: PipelineRank) -> Tensor:
        stage = rank.cut(model, F.cross_entropy, microbatches=4, cuts=["4"])
        with pytest.raises(ConfigError, match=r"on a batch of shape \(1, 6\).*more than 1 value"):
            stage.train_batch(x, y)
        return stage.eval()(x)

    for output in on_ranks(run, 2):
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


class Larger(nn.Module):
    """A block that returns more than the meta device has shown, and one that drops it."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return x if x.is_meta else x.repeat(1, self.times)[:, : WIDTH * self.times]


class Smaller(nn.Module):
    """A block that drops it."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :WIDTH]


def test_values_that_have_no_room_are_refused() -> None:
    ((x, y),) = batches(800)
    model = mlp(Larger(3), Smaller())

    def run(rank: PipelineRank) -> str:
        stage = rank.cut(model, F.cross_entropy, microbatches=2, cuts=["9"])
        try:
            stage.train_batch(x, y)
        except ConfigError as error:
            rank.run.context.abort()
            return str(error)
        except Exception:
            return ""
        return "trained"

    assert on_ranks(run, 2) == [
        f"a stage returns torch.float64 of shape (400, {3 * WIDTH}), for which its receiver has no "
        f"memory: on the meta device the stages returned {400 * WIDTH * 8:,} bytes at most. Use "
        "operations whose results' shapes follow from shapes alone.",
        "",
    ]


@pytest.mark.parametrize("checkpoints", [False, True])
def test_cumulative_averages_count_microbatches(checkpoints: bool) -> None:
    norms = (nn.BatchNorm1d(WIDTH, momentum=None), nn.BatchNorm1d(WIDTH))
    model = mlp(*norms, Instances(), nn.Linear(WIDTH, WIDTH).double())
    options = {"cuts": ["9"], "checkpoint_activations": checkpoints}
    require_equal(model, 2, microbatches=3, data=batches(12, 12, 9), **options)


class Instances(nn.Module):
    """A norm of each sample's values, which has running statistics, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x.unflatten(1, (2, 3))).flatten(1)
        return result


class Listed(nn.Module):
    """A model whose forward runs the modules of a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


@pytest.mark.parametrize("cuts", [["layers.1"], ["layers.2.1"], ["layers"], ["layers", "head"]])
def test_a_model_is_cut_inside_a_list_of_modules(cuts: list[str]) -> None:
    require_equal(Listed(), len(cuts) + 1, microbatches=3, cuts=cuts)


def refusals(model: nn.Module, *, y: Any = None, **options: Any) -> set[str]:
    """Return the sentences of the ranks that refuse a model, or its first batch."""
    ((x, labels),) = batches(8)

    def run(rank: PipelineRank) -> str:
        try:
            stage = rank.cut(
                model, F.cross_entropy, **{"microbatches": 2, "cuts": ["4"], **options}
            )
            stage.train_batch(x, labels if y is None else y(rank, labels))
        except ConfigError as error:
            rank.run.context.abort()
            return str(error)
        except CommError:
            return ""
        return "trained"

    return {*on_ranks(run, 2)} - {""}


def test_labels_that_differ_between_the_stages_are_refused() -> None:
    def rolled(rank: PipelineRank, labels: Tensor) -> Tensor:
        return labels.roll(rank.run.context.along("stage").rank)

    sentences = refusals(mlp(), y=rolled)
    assert sentences
    for sentence in sentences:
        assert sentence.startswith(
            "model.train_batch() got torch.float64 of shape (8, 6) and labels"
        )
        assert "pass the same batch on all stages, as paceline.loader() yields it" in sentence


def test_a_batch_norm_of_two_stages_is_refused() -> None:
    norm = nn.BatchNorm1d(WIDTH).double()
    model = nn.Sequential(mlp()[0], norm, mlp()[2], norm, nn.Linear(WIDTH, 3).double())
    assert refusals(model, cuts=["2"]) == {
        "stages 0 and 1 have the BatchNorm 1, of whose running statistics each would update a "
        "copy: give each place of the model one of its own, or cut the model so that one stage has "
        "all of them."
    }


@pytest.mark.parametrize(
    "register", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_hooks_of_what_is_taken_apart_are_refused(register: str) -> None:
    model = Listed()
    getattr(model, f"register_{register}")(lambda *_: None)
    (sentence,) = refusals(model, cuts=["head"])
    assert sentence.startswith("the model has a hook of its forward or backward pass, which would")
    model = Listed()
    getattr(model.layers[1], f"register_{register}")(lambda *_: None)
    (sentence,) = refusals(model, cuts=["layers.1.1"])
    assert sentence.startswith("the model's layers.1 has a hook of its forward or backward pass")
    require_equal(model, 2, data=batches(8), microbatches=2, cuts=["layers.2"])


def test_the_backward_of_an_evaluation_is_refused() -> None:
    ((x, y),) = batches(8)

    def run(rank: PipelineRank) -> bool:
        stage = rank.cut(mlp(), F.cross_entropy, microbatches=2, cuts=["4"])
        loss = F.cross_entropy(stage(x), y)
        with pytest.raises(
            ConfigError, match=r"Call model\.train_batch\(x, y\) in place of forward"
        ):
            loss.backward()
        with torch.no_grad():
            assert not stage(x).requires_grad
        return stage.eval()(x).requires_grad

    assert on_ranks(run, 2) == [False, False]


def test_an_evaluation_has_the_dtype_that_autocast_gives_it() -> None:
    model = mlp().float()
    x = batches(8)[0][0].float()
    autocast = torch.autocast("cpu", torch.bfloat16)
    with autocast:
        expected = model(x)

    def run(rank: PipelineRank) -> Tensor:
        stage = rank.cut(model, F.cross_entropy, microbatches=2, cuts=["4"]).eval()
        with autocast:
            return stage(x)

    for output in on_ranks(run, 2):
        torch.testing.assert_close(output, expected)


def test_blocks_whose_forward_changes_buffers_are_not_computed_twice() -> None:
    model = mlp()
    nn.utils.parametrizations.spectral_norm(model[4])
    (sentence,) = refusals(model, checkpoint_activations=True)
    assert sentence.startswith(
        "the model's forward changes its buffer 4.parametrizations.weight.0._u, but checkpointed "
        "activations are computed twice"
    )
    data = batches(12, 9)
    require_equal(model, 2, microbatches=3, cuts=["4"], data=data)
    normed = mlp()
    nn.utils.parametrizations.weight_norm(normed[4])
    options = {"cuts": ["4"], "data": data, "checkpoint_activations": True}
    require_equal(normed, 2, microbatches=3, **options)
