"""The zoo against the published tables, and models of other people's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import ConfigError
from paceline.models.resnet import PadShortcut
from paceline.models.zoo import MODELS, build_model

# Parameters as torchvision's documentation and, for CIFAR-10, He et al.'s table 6 (0.27 and 0.85
# million) and its reimplementations state them; 10^9 multiplications and additions an image.
PUBLISHED = {
    # name: (labels, pixels, parameters, GMAC)
    "resnet18": (1000, 224, 11_689_512, 1.814),
    "resnet34": (1000, 224, 21_797_672, 3.664),
    "resnet50": (1000, 224, 25_557_032, 4.089),
    "resnet101": (1000, 224, 44_549_160, 7.801),
    "resnet152": (1000, 224, 60_192_808, 11.514),
    "resnet20": (10, 32, 269_722, 0.041),
    "resnet56": (10, 32, 853_018, 0.126),
}


def test_the_published_table_covers_the_zoo() -> None:
    assert set(PUBLISHED) == set(MODELS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_operations_are_the_published_ones(name: str) -> None:
    labels, pixels, parameters, gmac = PUBLISHED[name]
    with torch.device("meta"):
        model = build_model(name, num_labels=labels, num_channels=3).eval()
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 3, pixels, pixels))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert counter.get_total_flops() / 2e9 == pytest.approx(gmac, rel=0.02, abs=0.0006)


def test_a_bottleneck_has_its_stride_in_the_3x3_convolution() -> None:
    with torch.device("meta"):
        model = build_model("resnet50", num_labels=1000, num_channels=3)
    strides = {n: m.stride for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    assert strides["layer2.0.conv1"] == (1, 1)
    assert strides["layer2.0.conv2"] == (2, 2)


def test_names_and_shapes_of_weights_are_torchvisions() -> None:
    with torch.device("meta"):
        state = build_model("resnet50", num_labels=1000, num_channels=3).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert len(shapes) == 320  # entries of torchvision's resnet50
    assert list(shapes)[:6] == [
        "conv1.weight",
        "bn1.weight",
        "bn1.bias",
        "bn1.running_mean",
        "bn1.running_var",
        "bn1.num_batches_tracked",
    ]
    expected = {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.running_var": (256,),
        "layer1.2.conv1.weight": (64, 256, 1, 1),
        "layer3.0.conv2.weight": (256, 256, 3, 3),
        "layer3.5.bn3.bias": (1024,),
        "layer4.2.conv3.weight": (2048, 512, 1, 1),
        "fc.weight": (1000, 2048),
        "fc.bias": (1000,),
    }
    assert {name: shapes[name] for name in expected} == expected


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet20"])
@pytest.mark.parametrize("pixels", [27, 32, 65])
def test_any_image_size_and_number_of_channels_fits(name: str, pixels: int) -> None:
    with torch.device("meta"):
        model = build_model(name, num_labels=7, num_channels=1)
        assert model(torch.empty(2, 1, pixels, pixels)).shape == (2, 7)


@pytest.mark.parametrize("name", ["resnet18", "resnet20"])
def test_initial_weights_are_a_function_of_the_seed(name: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        model = build_model(name, num_labels=3, num_channels=3)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_initial_weights_have_kaimings_deviation() -> None:
    torch.manual_seed(0)
    weight = build_model("resnet18", num_labels=3, num_channels=3).get_parameter(
        "layer4.1.conv2.weight"
    )
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet20"])
def test_channels_last_computes_the_same_in_float64(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, num_labels=5, num_channels=3).double()
    images = torch.randn(2, 3, 33, 33, dtype=torch.float64)
    plain = model(images)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.testing.assert_close(
        model(images.to(memory_format=torch.channels_last)), plain, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet20"])
def test_bfloat16_autocast_trains(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, num_labels=5, num_channels=3)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.randn(2, 3, 32, 32))
    assert logits.dtype == torch.bfloat16
    logits.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_shortcut_of_option_a_takes_every_other_pixel_and_appends_zeros() -> None:
    x = torch.arange(2 * 3 * 5 * 5, dtype=torch.float32).view(2, 3, 5, 5)
    y = PadShortcut(3, 7, 2)(x)
    assert torch.equal(y[:, :3], x[:, :, ::2, ::2])
    assert torch.equal(y[:, 3:], torch.zeros(2, 4, 3, 3))


OWN = """
from torch import nn

def both(num_labels, num_channels):
    return nn.Conv2d(num_channels, num_labels, 1)

def labels_only(*, num_labels, width=4):
    return nn.Linear(width, num_labels)

def anything(**options):
    return nn.Linear(options["num_channels"], options["num_labels"])

class Model(nn.Linear):
    def __init__(self, num_labels):
        super().__init__(2, num_labels)

def needs_more(num_labels, depth):
    return nn.Linear(depth, num_labels)

def no_module(num_labels):
    return num_labels

size = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "a_persons_model.py").write_text(OWN)
    (tmp_path / "a_broken_model.py").write_text("raise RuntimeError('no weather today')")
    monkeypatch.syspath_prepend(tmp_path)
    yield "a_persons_model"
    sys.modules.pop("a_persons_model", None)


@pytest.mark.parametrize("function", ["both", "labels_only", "anything", "Model"])
def test_anybodys_function_gets_what_it_takes(own_module: str, function: str) -> None:
    model = build_model(f"{own_module}:{function}", num_labels=6, num_channels=2)
    assert next(model.parameters()).shape[0] == 6


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("resnt50", "did you mean resnet50"),
        ("vgg", "The zoo has resnet18, resnet34"),
        (":f", "package.module:function"),
        ("no.such.module:f", "module no.such.module can't be imported.*No module named"),
        ("a_broken_model:f", "RuntimeError: no weather today"),
        ("a_persons_model:nothing", "has no function nothing"),
        ("a_persons_model:size", "has no function size"),
        ("a_persons_model:needs_more", "missing a required argument: 'depth'"),
        ("a_persons_model:no_module", "returned int"),
    ],
)
def test_a_model_that_cannot_be_made_is_a_sentence(
    own_module: str, name: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_model(name, num_labels=6, num_channels=2)
