"""A model's file in Caffe2's format is the one that Caffe2 itself wrote, and computes the same.

`fixtures/caffe2` has what Caffe2 of torch 1.7.1 wrote for its ResNet-50 of 10 labels: the networks
of `predictor_exporter.save_to_db`, and its logits. The parameters are a formula of their names.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from paceline.errors import CheckpointError, ConfigError
from paceline.inference.export.caffe2_net import MetaNetDef, is_caffe2s, write_caffe2
from paceline.models.resnet import Bottleneck, ResNet
from paceline.models.zoo import build_model
from paceline.state.weights import load_weights
from paceline.state.weights_caffe2 import LENGTHS, META_NET, BlobProto, blob_names

CAFFE2 = Path(__file__).parents[1] / "fixtures/caffe2"
# Of all records but that of the networks, sorted: each key, then its value.
SHA256 = "6f111d59867f63de833f7706eceee2bd0e94b53ff9fab790fb1c14fe201c08e1"


def value_of(blob: str, shape: torch.Size) -> torch.Tensor:
    """Return a blob's values, by the formula with which Caffe2's file was made."""
    i = np.arange(math.prod(shape), dtype=np.int64)
    b = (((7 * i + sum(map(ord, blob))) % 31 - 15) / np.float32(15)).astype(np.float32)
    if blob.endswith("_s"):
        values = 0.35 + 0.05 * b
    elif blob.endswith("_riv"):
        values = 1 + 0.5 * np.abs(b)
    elif blob.endswith(("_rm", "_b")):
        values = 0.1 * b
    else:
        values = np.float32(0.8 * math.sqrt(3 / math.prod(shape[1:]))) * b
    return torch.from_numpy(values.astype(np.float32)).view(shape)


def records(path: Path) -> Iterator[tuple[str, bytes]]:
    content = path.read_bytes()
    at = 0
    while at < len(content):
        key, value = LENGTHS.unpack_from(content, at)
        at += LENGTHS.size + key + value
        yield content[at - value - key : at - value].decode(), content[at - value : at]


@pytest.fixture(scope="module")
def resnet50() -> nn.Module:
    """ResNet-50 with the parameters of the formula."""
    model = build_model("resnet50", num_labels=10, num_channels=3).eval()
    state = model.state_dict()
    for name, blob in blob_names((3, 4, 6, 3), 10).items():
        value = value_of(blob, state[name].shape)
        state[name].copy_(value.flip(1) if name == "conv1.weight" else value)
    return model


@pytest.fixture(scope="module")
def written(resnet50: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its file, as Paceline writes it."""
    path = tmp_path_factory.mktemp("caffe2") / "resnet50.mdl"
    with path.open("wb") as file:
        write_caffe2(file, resnet50, 64)
    return path


def test_the_records_are_those_that_caffe2_wrote(written: Path) -> None:
    found = dict(records(written))
    networks = MetaNetDef.FromString(BlobProto.FromString(found.pop(META_NET)).content)
    known = MetaNetDef.FromString(gzip.decompress((CAFFE2 / "resnet50_L10.meta.gz").read_bytes()))
    networks.nets[2].value.name = known.nets[2].value.name  # Caffe2 counts its networks
    assert networks == known
    digest = hashlib.sha256()
    for key in sorted(found):
        digest.update(key.encode() + found[key])
    assert digest.hexdigest() == SHA256


def test_a_model_from_the_file_has_caffe2s_logits(written: Path) -> None:
    model = build_model("resnet50", num_labels=10, num_channels=3).eval()
    assert load_weights(written, model) == ()
    known = np.load(CAFFE2 / "forward.npz")
    with torch.no_grad():
        logits = model(torch.from_numpy(known["x"]).flip(1))  # Caffe2's are blue, green, red
    wanted = torch.from_numpy(known["logits"])
    assert (logits - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def small(num_labels: int = 3, depths: tuple[int, ...] = (1, 2)) -> ResNet:
    torch.manual_seed(0)
    return ResNet(Bottleneck, depths, num_labels=num_labels, num_channels=3).eval()


def write(model: nn.Module, path: Path) -> bytes:
    with path.open("wb") as file:
        write_caffe2(file, model, 32)
    return path.read_bytes()


def test_other_depths_and_labels_come_back(tmp_path: Path) -> None:
    model = small()
    write(model, tmp_path / "w.mdl")
    other = small()
    nn.init.zeros_(other.fc.weight)
    load_weights(tmp_path / "w.mdl", other)
    pairs = zip(model.state_dict().items(), other.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for (_, a), b in pairs)
    assert load_weights(tmp_path / "w.mdl", small(num_labels=5))[0].endswith(
        "it keeps its initial values."
    )


def test_networks_that_caffe2_has_not_are_known() -> None:
    assert is_caffe2s(small())
    for name in ("resnet18", "resnet20"):
        with torch.device("meta"):
            assert not is_caffe2s(build_model(name, num_labels=3, num_channels=3))


def test_torn_and_other_files_are_sentences(tmp_path: Path) -> None:
    path = tmp_path / "w.mdl"
    content = write(small(), path)
    head = len(META_NET) + LENGTHS.size
    for changed, sentence in (
        (content[:-5], "torn or damaged .it ends within a record"),
        (content[: len(content) // 2], "torn or damaged"),
        (content + struct.pack("<ii", -1, 3), "a record of -1 and 3 bytes"),
        (content[:head] + b"x" * 20, "torn or damaged"),
    ):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=sentence):
            load_weights(path, small())
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"another model: missing layer2\.2"):
        load_weights(path, small(depths=(1, 3)))
