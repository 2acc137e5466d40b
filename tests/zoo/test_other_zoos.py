"""Models of torchvision, timm and transformers, by name. `make test-zoo` has these packages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.cli.flags import parse
from paceline.cli.main import main
from paceline.config.train import TrainConfig
from paceline.errors import ConfigError
from paceline.models.zoo import build_model
from paceline.state.weights import save_weights
from paceline.wiring.model import check_model, make_model
from tests.harness.processes.command import run

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
WORDS = ("--train_data", "null", "--epoch_size", "8", "--augment", "none", "--use_cpu")


def config_of(*words: str) -> TrainConfig:
    return parse(TrainConfig, [*WORDS, *words], prog="paceline train", description="")


def started(*words: str) -> tuple[nn.Module, list[str]]:
    """Return the model that a run starts with, and what is said of it."""
    config, notes = config_of(*words), list[str]()
    check_model(config)
    return make_model(config, CPU, report=notes.append), notes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of transformers, with a small classifier of 7 classes."""
    torch.manual_seed(4)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=7
    )
    transformers.AutoModelForImageClassification.from_config(config).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("torchvision:mobilenet_v3_small", 32), ("torchvision:squeezenet1_1", 64)),
        *(("torchvision:googlenet", 64), ("torchvision:inception_v3", 75)),
        *(("timm:test_resnet", 32), ("timm:test_vit", 160), ("timm:test_byobnet.r160_in1k", 64)),
    ],
)
def test_a_model_has_the_datas_classes(name: str, size: int) -> None:
    model, _ = started("--model", name, "--num_labels", "5")
    assert model.train()(torch.randn(2, 3, size, size)).shape == (2, 5)


def test_timms_models_take_grey_images_and_torchvisions_say_that_they_dont() -> None:
    model, _ = started("--model", "timm:test_resnet", "--num_labels", "5", "--num_channels", "1")
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 5)
    said = "--num_channels 1: torchvision's models take images of 3 channels"
    with pytest.raises(ConfigError, match=said):
        started("--model", "torchvision:resnet18", "--num_channels", "1")


def test_a_folder_of_transformers_is_a_model_and_its_weights(folder: Path) -> None:
    known = transformers.AutoModelForImageClassification.from_pretrained(folder)
    model, notes = started(
        "--model", f"hf:{folder}", "--weights", "pretrained", "--num_labels", "7"
    )
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model.eval()(images), known.eval()(images).logits)
    assert notes == [f"hf:{folder} (pretrained): the model begins with all of its weights."]
    file = str(folder / "model.safetensors")
    model, _ = started("--model", f"hf:{folder}", "--weights", file, "--num_labels", "7")
    torch.testing.assert_close(model.eval()(images), known.eval()(images).logits)


def test_the_head_for_other_classes_is_new_and_named(folder: Path) -> None:
    model, notes = started(
        "--model", f"hf:{folder}", "--weights", "pretrained", "--num_labels", "3"
    )
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 3)
    assert notes == [
        f"hf:{folder} (pretrained): the last layer's classifier.1.{name} but should be {should}: "
        "it keeps its initial values."
        for name, should in (("weight is 7×16", "3×16"), ("bias is 7", "3"))
    ]


def test_published_weights_are_found_in_the_packages_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    (kind,) = torchvision.models.get_model_weights("squeezenet1_1")
    file = tmp_path / "checkpoints" / kind.url.rpartition("/")[2]
    file.parent.mkdir()
    published = build_model("torchvision:squeezenet1_1", num_labels=1000, num_channels=3)
    save_weights(file, published)
    for name in ("pretrained", "IMAGENET1K_V1"):
        model, _ = started("--model", "torchvision:squeezenet1_1", "--weights", name)
        for one, other in zip(model.parameters(), published.parameters(), strict=True):
            assert torch.equal(one, other)


def test_two_workers_train_a_model_and_its_weights_are_its_packages(tmp_path: Path) -> None:
    words = (*WORDS, "--image_size", "32", "--num_labels", "4", "--batch_size", "4")
    more = ("--num_workers", "2", "--num_epochs", "1", "--run_id", "r")
    ended = run("train", *words, *more, "--model", "timm:test_resnet", folder=tmp_path)
    assert ended.status == 0, ended.text
    state = torch.load(tmp_path / "runs" / "r" / "test_resnet_model.pt", weights_only=True)
    timm.create_model("test_resnet", num_classes=4).load_state_dict(state)


def test_models_are_listed_with_the_packages_own_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["zoo", "torchvision:resnet*", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (one,) = [
        e for e in found if (e["name"], e["weights"])[1] == "IMAGENET1K_V2" and "50" in e["name"]
    ]
    meta = torchvision.models.ResNet50_Weights.IMAGENET1K_V2.meta
    assert one["parameters"] == meta["num_params"]
    assert one["accuracy"] == pytest.approx(meta["_metrics"]["ImageNet-1K"]["acc@1"] / 100)
    assert main(["zoo", "timm:test_res*", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    counts = {one["name"]: one["parameters"] for one in found}
    model = timm.create_model("test_resnet", num_classes=1000)
    assert counts["timm:test_resnet"] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--model torchvision:resnet81",
            "no model torchvision:resnet81: did you mean torchvision:",
        ),
        ("--model timm:resnet81", "no model timm:resnet81: did you mean timm:resnet"),
        ("--model hf:/nowhere", "Model hf:/nowhere can't be found .*: give a folder with a config"),
        (
            "--model torchvision:resnet18 --weights IMAGENET1K_V9",
            "--weights IMAGENET1K_V9: is neither a file nor published .* pretrained, IMAGENET1K_V1",
        ),
        ("--model timm:test_vit --freeze stem.*", "--freeze stem.*: matches no parameter"),
    ],
)
def test_what_there_isnt_is_a_sentence(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("stem.*:", r"stem\.\*:")):
        started(*words.split())
