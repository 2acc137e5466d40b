"""Weights in Caffe2's format: a minidb of blobs, as its trainer saves models (`.mdl`).

    !!META_NET_DEF       the networks, and which of their blobs are parameters, inputs and outputs
    conv1_w#%0           a blob's first million values; conv1_w#%1 … has the next ones
    …

Blobs of its ResNets have the names of `resnet50_trainer`; here they get those of `ResNet`, which
are torchvision's:

    conv1_w, conv1_spatbn_relu_{s,b,rm,riv}           conv1, bn1
    comp_K_conv_J_w, comp_K_spatbn_J_{s,…}            layerS.B.convJ, .bnJ: block K, counted through
    shortcut_projection_K_w, …_K_spatbn_{s,…}         layerS.0.downsample: begins a stage
    last_out_L10_w, last_out_L10_b                    fc, for 10 labels

Caffe2 has blue, green, red where Paceline has red, green, blue: the channels of the first layer's
weights are reversed. `_riv` is the running variance.
https://github.com/pytorch/pytorch/blob/v1.7.1/caffe2/python/predictor/predictor_exporter.py
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.state.protobuf import Field, Messages, message_classes

META_NET: Final = "!!META_NET_DEF"
LENGTHS: Final = struct.Struct("<ii")  # of a record's key and value
FLOAT: Final = 1  # TensorProto.DataType

_MESSAGES: Final[Messages] = {
    "Segment": {
        "begin": (1, Field.TYPE_INT64, False, False),
        "end": (2, Field.TYPE_INT64, False, False),
    },
    "DeviceOption": {"device_type": (1, Field.TYPE_INT32, False, False)},
    "TensorProto": {
        "dims": (1, Field.TYPE_INT64, True, False),
        "data_type": (2, Field.TYPE_INT32, False, False),
        # Packed floats are bytes on the wire, which numpy reads as they are.
        "float_data": (3, Field.TYPE_BYTES, False, False),
        "name": (7, Field.TYPE_STRING, False, False),
        "device_detail": (8, Field.TYPE_MESSAGE, False, "DeviceOption"),
        "segment": (11, Field.TYPE_MESSAGE, False, "Segment"),
    },
    "BlobProto": {
        "name": (1, Field.TYPE_STRING, False, False),
        "type": (2, Field.TYPE_STRING, False, False),
        "tensor": (3, Field.TYPE_MESSAGE, False, "TensorProto"),
        "content": (4, Field.TYPE_BYTES, False, False),
    },
}
BlobProto = message_classes("paceline.caffe2", _MESSAGES)["BlobProto"]
_STATISTICS = {"s": "weight", "b": "bias", "rm": "running_mean", "riv": "running_var"}
_PROJECTION = re.compile(r"shortcut_projection_(\d+)_w")
_BLOCK = re.compile(r"comp_(\d+)_conv_1_w")
_HEAD = re.compile(r"last_out_L\d+")


def begins_as_caffe2(start: bytes) -> bool:
    """Return whether a file's first bytes are those of such a minidb."""
    head = LENGTHS.size + len(META_NET)
    return (
        len(start) >= head
        and LENGTHS.unpack_from(start)[0] == len(META_NET)
        and start[LENGTHS.size : head] == META_NET.encode()
    )


def blob_names(depths: Sequence[int], num_labels: int) -> dict[str, str]:
    """Return the blobs of a ResNet of bottlenecks, by the names of its parameters.

    Args:
        depths: number of blocks in each stage.
        num_labels: classes.
    """
    layers = {"conv1": "conv1", "bn1": "conv1_spatbn_relu"}
    number = 0
    for stage, depth in enumerate(depths):
        for block in range(depth):
            own = f"layer{stage + 1}.{block}."
            for layer in (1, 2, 3):
                layers[f"{own}conv{layer}"] = f"comp_{number}_conv_{layer}"
                layers[f"{own}bn{layer}"] = f"comp_{number}_spatbn_{layer}"
            if block == 0:
                layers[f"{own}downsample.0"] = f"shortcut_projection_{number}"
                layers[f"{own}downsample.1"] = f"shortcut_projection_{number}_spatbn"
            number += 1
    parameters: dict[str, str] = {}
    statistics: dict[str, str] = {}
    for name, blob in layers.items():
        if "_spatbn" not in blob:
            parameters[f"{name}.weight"] = f"{blob}_w"
            continue
        parameters |= {f"{name}.{_STATISTICS[end]}": f"{blob}_{end}" for end in ("s", "b")}
        statistics |= {f"{name}.{_STATISTICS[end]}": f"{blob}_{end}" for end in ("rm", "riv")}
    parameters |= {"fc.weight": f"last_out_L{num_labels}_w", "fc.bias": f"last_out_L{num_labels}_b"}
    return parameters | statistics


def turned(weight: Tensor) -> Tensor:
    """Return the first layer's weights, (outputs, channels, h, w), for channels in reverse."""
    return weight.flip(1)


def read_caffe2(path: Path) -> OrderedDict[str, Tensor]:
    """Read a network's parameters, float32, under the names of `ResNet`.

    A network of other blobs keeps their names.

    Raises:
        CheckpointError: the file is torn, or a blob has values that aren't float32.
    """
    blobs = _read_blobs(path)
    numbers = sorted(int(match[1]) for name in blobs if (match := _BLOCK.fullmatch(name)))
    starts = {int(match[1]) for name in blobs if (match := _PROJECTION.fullmatch(name))}
    heads = {match[0] for name in blobs if (match := _HEAD.match(name))}
    if not numbers or len(heads) != 1:
        return blobs
    bounds = [*sorted(starts | {0}), numbers[-1] + 1]
    depths = [end - begin for begin, end in pairwise(bounds)]
    labels = int(heads.pop().removeprefix("last_out_L"))
    known = {blob: name for name, blob in blob_names(depths, labels).items()}
    state = OrderedDict((known.get(blob, blob), value) for blob, value in blobs.items())
    if "conv1.weight" in state:
        state["conv1.weight"] = turned(state["conv1.weight"])
    return state


def _read_blobs(path: Path) -> OrderedDict[str, Tensor]:
    blobs: OrderedDict[str, Tensor] = OrderedDict()
    for key, value in _records(path):
        if key == META_NET:
            continue
        try:
            blob = BlobProto.FromString(value)
        except Exception as error:  # protobuf has an error class for each of its implementations
            raise _damaged(path, f"blob {key} can't be read") from error
        tensor = blob.tensor
        if tensor.data_type != FLOAT or not tensor.float_data:
            raise CheckpointError(
                f"{path}: blob {blob.name} isn't of float32 values, as parameters are; save the "
                "model's parameters alone."
            )
        shape = tuple(tensor.dims)
        whole = blobs.setdefault(blob.name, torch.full(shape, torch.nan))
        values = torch.from_numpy(np.frombuffer(tensor.float_data, dtype="<f4").copy())
        begin = tensor.segment.begin
        if tuple(whole.shape) != shape or begin + len(values) > whole.numel():
            raise _damaged(path, f"blob {key} is larger than its dimensions")
        whole.view(-1)[begin : begin + len(values)] = values
    return blobs


def _records(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        while head := file.read(LENGTHS.size):
            if len(head) < LENGTHS.size:
                raise _damaged(path, "it ends within a record")
            key_bytes, value_bytes = LENGTHS.unpack(head)
            if key_bytes <= 0 or value_bytes <= 0:
                raise _damaged(path, f"a record of {key_bytes} and {value_bytes} bytes")
            content = file.read(key_bytes + value_bytes)
            if len(content) < key_bytes + value_bytes:
                raise _damaged(path, "it ends within a record")
            yield content[:key_bytes].decode(errors="replace"), content[key_bytes:]


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: torn or damaged ({reason}); use another file, or a fresh copy of this one."
    )
