"""Files of weights are plain PyTorch, and what can't be used is named."""

from __future__ import annotations

import os
import pickle
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from paceline.errors import CheckpointError, ConfigError
from paceline.models.zoo import build_model
from paceline.state import weights
from paceline.state.weights import check_weights, load_weights, save_weights


def network(labels: int = 4, width: int = 5) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            body=nn.Linear(3, width), norm=nn.BatchNorm1d(width), head=nn.Linear(width, labels)
        )
    )


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_torch_alone_loads_what_was_saved(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save_weights(tmp_path / "w.pt", model)
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    assert torch.equal(state["weight"], model.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["w.pt"]


def saved_plainly(model: nn.Module, path: Path) -> None:
    torch.save(model.state_dict(), path)


def saved_in_the_old_format(model: nn.Module, path: Path) -> None:
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)


def saved_as_a_checkpoint(model: nn.Module, path: Path) -> None:
    torch.save({"paceline": 1, "model": model.state_dict(), "position": {"step": 3}}, path)


def saved_from_ddp(model: nn.Module, path: Path) -> None:
    torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, path)


def saved_compiled(model: nn.Module, path: Path) -> None:
    state = {name.replace(".", "._orig_mod.", 1): v for name, v in model.state_dict().items()}
    torch.save({f"module._orig_mod.{name}": value for name, value in state.items()}, path)


def saved_as_safetensors(model: nn.Module, path: Path) -> None:
    save_file(model.state_dict(), path)


SAVED = {  # with the parts of names that are removed
    saved_plainly: (),
    saved_in_the_old_format: (),
    saved_as_a_checkpoint: (),
    saved_from_ddp: ('"module."',),
    saved_compiled: ('"module." and "_orig_mod."',),
    saved_as_safetensors: (),
}


def removal(path: Path, save: Any) -> list[str]:
    said = f"{path}: the names of its weights were read without"
    return [f"{said} {removed}." for removed in SAVED[save]]


@pytest.mark.parametrize("save", SAVED)
def test_weights_are_loaded_whoever_saved_them(tmp_path: Path, save: Any) -> None:
    model, other = network(), network()
    save(model, tmp_path / "w")
    assert list(load_weights(tmp_path / "w", other)) == removal(tmp_path / "w", save)
    assert equal(model, other)


WEIGHTS = network().state_dict()
AVERAGE = {name: value + 1 for name, value in WEIGHTS.items()}
OPTIMIZER = {"state": {0: {"momentum_buffer": torch.ones(5, 3)}}, "param_groups": [{"lr": 0.1}]}


def after(prefix: str, state: Any = WEIGHTS) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in state.items()}


NESTED = {  # a file, the name of its entry, and what else is said
    "PyTorch's ImageNet example": (
        {
            **{"epoch": 3, "arch": "resnet18", "best_acc1": torch.tensor(1.0)},
            **{"state_dict": after("module."), "optimizer": OPTIMIZER, "scheduler": {}},
        },
        "state_dict",
        ['the names of its weights were read without "module.".'],
    ),
    "Lightning": (
        {"pytorch-lightning_version": "2.5", "state_dict": after("model."), "loops": {"a": {}}},
        "state_dict",
        ['the names of its weights were read without "model.".'],
    ),
    "Lightning, with a loss's weights": (
        {"state_dict": {"criterion.weight": torch.ones(4), **after("model.")}},
        "state_dict",
        [
            'the names of its weights were read without "model.".',
            "criterion.weight: left out, for the others begin with model.",
        ],
    ),
    "torchvision's references": (
        {"model": WEIGHTS, "optimizer": OPTIMIZER, "args": Namespace(lr=0.1), "epoch": 3},
        "model",
        [],
    ),
    "timm": (
        {"arch": "x", "state_dict_ema": AVERAGE, "state_dict": WEIGHTS, "optimizer": OPTIMIZER},
        "state_dict",
        ["other weights of such a model were left out: state_dict_ema."],
    ),
    "an average first": (
        {"ema": AVERAGE, "model_state_dict": WEIGHTS},
        "model_state_dict",
        ["other weights of such a model were left out: ema."],
    ),
    "an average alone": ({"epoch": 1, "state_dict_ema": WEIGHTS}, "state_dict_ema", []),
    "PyTorch's tutorial": (
        {"epoch": 5, "model_state_dict": WEIGHTS, "optimizer_state_dict": OPTIMIZER, "loss": 0.4},
        "model_state_dict",
        [],
    ),
    "entries within entries": ({"nets": {"a": WEIGHTS, "b": {"x": torch.ones(1)}}}, "nets.a", []),
    "compiled in DDP": (
        {"state_dict": after("_orig_mod.module.")},
        "state_dict",
        ['the names of its weights were read without "module." and "_orig_mod.".'],
    ),
    "any wrapper": (
        {"net": after("backbone.encoder.")},
        "net",
        ['the names of its weights were read without "backbone.encoder.".'],
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_weights_are_found_in_an_entry_and_it_is_said(tmp_path: Path, name: str) -> None:
    content, entry, said = NESTED[name]
    torch.save(content, tmp_path / "w.pt")
    model = network()
    notes = [f"its entry {entry} has the weights.", *said]
    assert load_weights(tmp_path / "w.pt", model) == tuple(
        f"{tmp_path / 'w.pt'}: {n}" for n in notes
    )
    found = model.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in WEIGHTS.items())


def test_two_models_in_one_file_of_which_neither_is_most_of_it_are_refused(tmp_path: Path) -> None:
    torch.save({**after("student."), **after("teacher.")}, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=r"missing body\.weight, .*unknown student\.body\.weight"):
        load_weights(tmp_path / "w.pt", network())


@pytest.mark.parametrize("prefix", ["", "module.", "model."])
def test_another_models_weights_in_an_entry_are_refused_by_its_name(
    tmp_path: Path, prefix: str
) -> None:
    torch.save({"state_dict": after(prefix, network(width=6).state_dict())}, tmp_path / "w.pt")
    with pytest.raises(
        ConfigError, match=r"weights \(those in its entry state_dict\) .*: body\.weight is 6×3 but"
    ):
        load_weights(tmp_path / "w.pt", network())


def test_a_model_whose_own_names_have_a_prefix_keeps_it(tmp_path: Path) -> None:
    model, other = (nn.Sequential(OrderedDict(model=network())) for _ in range(2))
    torch.save(model.state_dict(), tmp_path / "w.pt")
    assert load_weights(tmp_path / "w.pt", other) == ()
    assert equal(model, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    model, other = network(), network()
    torch.save(model.to(dtype).state_dict(), tmp_path / "w.pt")
    load_weights(tmp_path / "w.pt", other)
    assert {value.dtype for value in other.parameters()} == {torch.float32}
    assert torch.equal(other.body.weight, model.body.weight.float())  # type: ignore[union-attr, operator, arg-type]


def test_weights_from_before_batchnorm_counted_are_loaded(tmp_path: Path) -> None:
    model, other = network(), network()
    state = {k: v for k, v in model.state_dict().items() if "num_batches" not in k}
    torch.save(state, tmp_path / "w.pt")
    assert load_weights(tmp_path / "w.pt", other) == ()
    assert torch.equal(other.body.weight, model.body.weight)  # type: ignore[union-attr, arg-type]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight


def test_a_tied_weight_may_be_in_the_file_under_one_of_its_names(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    save_model(model, str(tmp_path / "w"))
    load_weights(tmp_path / "w", other)
    assert torch.equal(other.embedding.weight, model.embedding.weight)
    assert other.head.weight is other.embedding.weight


@pytest.mark.parametrize("save", SAVED)
def test_a_last_layer_for_other_labels_stays_new(tmp_path: Path, save: Any) -> None:
    model, other = network(labels=4), network(labels=6)
    fresh: Tensor = other.head.weight.detach().clone()  # type: ignore[union-attr, operator, assignment]
    save(model, tmp_path / "w")
    assert load_weights(tmp_path / "w", other) == (
        f"{tmp_path / 'w'}: the last layer's head.weight is 4×5 but should be 6×5: it keeps its "
        "initial values.",
        f"{tmp_path / 'w'}: the last layer's head.bias is 4 but should be 6: it keeps its initial "
        "values.",
        *removal(tmp_path / "w", save),
    )
    assert torch.equal(other.head.weight, fresh)  # type: ignore[union-attr, arg-type]
    assert equal(model.body, other.body)  # type: ignore[arg-type]


def test_a_zoo_model_is_fine_tuned_for_other_labels(tmp_path: Path) -> None:
    model = build_model("resnet20", num_labels=10, num_channels=3)
    save_weights(tmp_path / "w.pt", model)
    notes = load_weights(tmp_path / "w.pt", build_model("resnet20", num_labels=3, num_channels=3))
    assert len(notes) == 2


@pytest.mark.parametrize(
    ("model", "difference"),
    [
        (network(width=6), r"body\.weight is 5×3 but should be 6×3, body\.bias is 5 .*… \(7\)"),
        (nn.Sequential(OrderedDict(body=nn.Linear(3, 5))), r"unknown norm\.weight, .*, … \(7\)"),
        (
            nn.Sequential(OrderedDict([*network().named_children(), ("tail", nn.Linear(4, 1))])),
            r"missing tail\.weight, tail\.bias\.",
        ),
        (nn.Linear(3, 5), r"missing weight, bias; unknown body\.weight"),
    ],
)
def test_another_models_weights_are_refused_with_the_first_differences(
    tmp_path: Path, model: nn.Module, difference: str
) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_weights(tmp_path / "w.pt", network())
    with pytest.raises(
        ConfigError, match=rf"w\.pt: the weights belong to another model: .*{difference}"
    ):
        load_weights(tmp_path / "w.pt", model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_layer_in_the_middle_of_other_outputs_is_refused(tmp_path: Path) -> None:
    vocabulary = nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 2))
    save_weights(tmp_path / "w.pt", vocabulary)
    with pytest.raises(ConfigError, match=r"0\.weight is 9×3 but should be 8×3\. Give"):
        load_weights(tmp_path / "w.pt", nn.Sequential(nn.Embedding(8, 3), nn.Linear(3, 2)))


def test_a_last_layer_of_other_inputs_is_refused(tmp_path: Path) -> None:
    save_weights(tmp_path / "w.pt", nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    with pytest.raises(ConfigError, match=r"1\.weight is 2×3 but should be 2×4"):
        load_weights(tmp_path / "w.pt", nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 2)))


def test_a_file_of_which_nothing_would_be_left_is_refused(tmp_path: Path) -> None:
    save_weights(tmp_path / "w.pt", nn.Linear(3, 2))
    with pytest.raises(ConfigError, match=r"weight is 2×3 but should be 5×3"):
        load_weights(tmp_path / "w.pt", nn.Linear(3, 5))


@pytest.mark.parametrize(
    ("name", "value"),
    [("head.weight", "nan"), ("head.weight", "inf"), ("norm.running_var", "nan")],
)
def test_weights_of_a_training_that_diverged_are_refused(
    tmp_path: Path, name: str, value: str
) -> None:
    """As in https://github.com/Rikorose/DeepFilterNet/issues/30: each loss would be NaN."""
    state = network().state_dict()
    state[name].view(-1)[1] = float(value)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=rf"w\.pt: {name} has values that are NaN or inf"):
        load_weights(tmp_path / "w.pt", network())


def test_a_mask_of_infinite_values_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    save_weights(tmp_path / "w.pt", model)
    load_weights(tmp_path / "w.pt", model)


@pytest.mark.parametrize("value", [torch.ones(4, 5, dtype=torch.int8), [1.0, 2.0]])
def test_what_is_no_weight_is_refused(tmp_path: Path, value: object) -> None:
    torch.save({**network().state_dict(), "head.weight": value}, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=r"head\.weight is (int8 but should be |not a tensor)"):
        load_weights(tmp_path / "w.pt", network())


def test_a_difference_that_lists_everything_is_cut(tmp_path: Path) -> None:
    save_weights(tmp_path / "w.pt", nn.Sequential(*[nn.Linear(1, 1) for _ in range(300)]))
    with pytest.raises(ConfigError, match=r"unknown 0\.weight, 0\.bias, 1\.weight, … \(600\)") as e:
        load_weights(tmp_path / "w.pt", nn.Linear(1, 1))
    assert len(str(e.value)) < 400


def test_a_missing_file_is_the_callers_mistake(tmp_path: Path) -> None:
    for look in (check_weights, lambda path: load_weights(path, nn.Linear(1, 1))):
        with pytest.raises(ConfigError, match="there is no such file"):
            look(tmp_path / "none.pt")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("evil",))


@pytest.mark.parametrize("old", [True, False])
def test_code_in_a_file_is_named_and_not_run(
    tmp_path: Path, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Evil()}, "w.pt", _use_new_zipfile_serialization=not old)
    with pytest.raises(CheckpointError, match=r"w\.pt: .*loading it would call posix\..*any code"):
        load_weights(Path("w.pt"), nn.Linear(1, 1))
    assert not Path("evil").exists()


def test_a_plain_pickle_of_code_is_named_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("w.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"w\.pt: not a file of weights"):
        load_weights(Path("w.pt"), nn.Linear(1, 1))
    assert not Path("evil").exists()


@pytest.mark.parametrize("content", [[torch.ones(3)], {}, {"epoch": 3}, {0: torch.ones(3)}])
def test_a_file_without_names_is_named(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"w\.pt: contains no named weights"):
        load_weights(tmp_path / "w.pt", nn.Linear(1, 1))


@pytest.mark.parametrize("content", [b"", b"abc", b"not weights", b"PK\x03\x04 torn"])
def test_a_damaged_file_is_named_before_anything_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"w\.pt: (torn or damaged|not a file of weights)"):
        check_weights(tmp_path / "w.pt")


def test_a_torn_old_file_is_named(tmp_path: Path) -> None:
    saved_in_the_old_format(network(), tmp_path / "w.pt")
    content = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(content[:-20])
    with pytest.raises(CheckpointError, match=r"w\.pt: not a file of weights: "):
        load_weights(tmp_path / "w.pt", network())


def test_a_flipped_bit_is_not_loaded(tmp_path: Path) -> None:
    model = network()
    saved_plainly(model, tmp_path / "w.pt")
    content = bytearray((tmp_path / "w.pt").read_bytes())
    weight: Tensor = model.body.weight  # type: ignore[union-attr, assignment]
    content[content.index(weight.detach().numpy().tobytes())] ^= 1
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"w\.pt: torn or damaged \(the checksum"):
        load_weights(tmp_path / "w.pt", network())


def test_safetensors_without_its_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_as_safetensors(network(), tmp_path / "w")
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[safetensors\]'"):
        check_weights(tmp_path / "w")


class FailsToPickle(nn.Linear):
    """Breaks while its state is written."""

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, object]:  # type: ignore[override]
        return {"fine": torch.ones(1000), "breaks": FullDisk()}


class FullDisk:
    def __reduce__(self) -> str:
        raise OSError(28, "No space left on device")


def test_a_failed_save_leaves_the_old_file_and_no_part(tmp_path: Path) -> None:
    save_weights(tmp_path / "w.pt", nn.Linear(3, 2))
    before = (tmp_path / "w.pt").read_bytes()
    with pytest.raises(CheckpointError, match=r"w\.pt: the weights can't be written \(No space"):
        save_weights(tmp_path / "w.pt", FailsToPickle(3, 2))
    assert (tmp_path / "w.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["w.pt"]
