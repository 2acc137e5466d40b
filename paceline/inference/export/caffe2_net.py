"""Caffe2's file of a ResNet: its parameters, and the networks that load them and predict.

The records are those that Caffe2's own `predictor_exporter.save_to_db("minidb", …)` writes for the
model of `resnet50_trainer`, operator by operator, so that `predictor_exporter.load_from_db` of
Caffe2 reads them:

    PREDICT_INIT_NET_TYPE    fills `data` and `softmax`
    GLOBAL_INIT_NET_TYPE     loads the parameters
    PREDICT_NET_TYPE         data, (n, channels, size, size), blue first ──▶ softmax

https://github.com/pytorch/pytorch/blob/v1.7.1/caffe2/proto/caffe2.proto
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO

from torch import Tensor, nn

from paceline.models.resnet import Bottleneck, ResNet
from paceline.state.protobuf import Field, Messages, message_classes
from paceline.state.weights_caffe2 import (
    FLOAT,
    LENGTHS,
    META_NET,
    BlobProto,
    blob_names,
    turned,
)

_CHUNK = 1_000_000  # values of a record
_SUMS = "comp_{}_sum_3"

_MESSAGES: Messages = {
    "Argument": {
        "name": (1, Field.TYPE_STRING, False, False),
        "f": (2, Field.TYPE_FLOAT, False, False),
        "i": (3, Field.TYPE_INT64, False, False),
        "s": (4, Field.TYPE_BYTES, False, False),
        "ints": (6, Field.TYPE_INT64, True, False),
    },
    "OperatorDef": {
        "input": (1, Field.TYPE_STRING, True, False),
        "output": (2, Field.TYPE_STRING, True, False),
        "name": (3, Field.TYPE_STRING, False, False),
        "type": (4, Field.TYPE_STRING, False, False),
        "arg": (5, Field.TYPE_MESSAGE, True, "Argument"),
        "engine": (7, Field.TYPE_STRING, False, False),
    },
    "NetDef": {
        "name": (1, Field.TYPE_STRING, False, False),
        "op": (2, Field.TYPE_MESSAGE, True, "OperatorDef"),
        "external_input": (7, Field.TYPE_STRING, True, False),
        "external_output": (8, Field.TYPE_STRING, True, False),
    },
    "NetsMap": {
        "key": (1, Field.TYPE_STRING, False, False),
        "value": (2, Field.TYPE_MESSAGE, False, "NetDef"),
    },
    "BlobsMap": {
        "key": (1, Field.TYPE_STRING, False, False),
        "value": (2, Field.TYPE_STRING, True, False),
    },
    "MetaNetDef": {
        "blobs": (1, Field.TYPE_MESSAGE, True, "BlobsMap"),
        "nets": (2, Field.TYPE_MESSAGE, True, "NetsMap"),
    },
}
_CLASSES = message_classes("paceline.caffe2.nets", _MESSAGES)
MetaNetDef = _CLASSES["MetaNetDef"]
_ORDER = {"order": b"NCHW"}
_CUDNN = {**_ORDER, "cudnn_exhaustive_search": 0}
_NATIVE = {**_ORDER, "use_cudnn": 1, "cudnn_exhaustive_search": 0}


def is_caffe2s(model: nn.Module) -> bool:
    """Return whether a model is one of Caffe2's trainer: a ResNet of bottlenecks."""
    blocks = [module for module in model.modules() if isinstance(module, Bottleneck)]
    return isinstance(model, ResNet) and model.pools and bool(blocks)


def write_caffe2(file: BinaryIO, model: nn.Module, image_size: int) -> None:
    """Write a model for which `is_caffe2s` holds, on the CPU.

    Args:
        file: to write to.
        model: has the parameters.
        image_size: height and width of an image, in pixels.
    """
    depths, strides = _structure(model)
    state = model.state_dict()
    labels, _ = state["fc.weight"].shape
    names = blob_names(depths, labels)
    meta = BlobProto(name=META_NET, type="std::string")
    nets = _nets([*names.values()], depths, strides, labels, state["conv1.weight"], image_size)
    meta.content = nets.SerializeToString()
    _write_record(file, META_NET, meta)
    for name, blob in names.items():
        value = turned(state[name]) if name == "conv1.weight" else state[name]
        flat = value.float().contiguous().view(-1)
        for number, begin in enumerate(range(0, len(flat), _CHUNK)):
            _write_record(file, f"{blob}#%{number}", _chunk(blob, value, flat, begin))


def _structure(model: nn.Module) -> tuple[list[int], list[int]]:
    """Return the number of blocks in each stage, and the stride of its first one."""
    stages = [module for name, module in model.named_children() if name.startswith("layer")]
    assert all(isinstance(stage, nn.Sequential) for stage in stages), "is_caffe2s holds"
    strides = [next(stage.children()).conv2.stride[0] for stage in stages]  # type: ignore[index]
    return [len([*stage.children()]) for stage in stages], [int(stride) for stride in strides]


def _chunk(blob: str, value: Tensor, flat: Tensor, begin: int) -> Any:
    record = BlobProto(name=blob, type="Tensor")
    values = flat[begin : begin + _CHUNK]
    record.tensor.dims.extend(value.shape)
    record.tensor.data_type = FLOAT
    record.tensor.float_data = values.numpy().astype("<f4").tobytes()
    record.tensor.name = blob
    record.tensor.device_detail.device_type = 0
    record.tensor.segment.begin = begin
    record.tensor.segment.end = begin + len(values)
    return record


def _write_record(file: BinaryIO, key: str, record: Any) -> None:
    value = record.SerializeToString()
    file.write(LENGTHS.pack(len(key), len(value)) + key.encode() + value)


def _nets(
    blobs: Sequence[str],
    depths: Sequence[int],
    strides: Sequence[int],
    labels: int,
    first: Tensor,
    image_size: int,
) -> Any:
    meta = MetaNetDef()
    for key, names in (
        ("PARAMETERS_BLOB_TYPE", blobs),
        ("INPUTS_BLOB_TYPE", ["data"]),
        ("OUTPUTS_BLOB_TYPE", ["softmax"]),
    ):
        meta.blobs.add(key=key, value=names)
    fills = meta.nets.add(key="PREDICT_INIT_NET_TYPE").value
    fills.name = "predict-init"
    fills.external_input.extend(["data", "softmax"])
    images = [2, first.shape[1], image_size, image_size]
    for blob, shape in (("data", images), ("softmax", [2, labels])):
        _add(fills, "ConstantFill", [], blob, {"shape": shape, "value": 0.0})
    loads = meta.nets.add(key="GLOBAL_INIT_NET_TYPE").value
    loads.name = "global-init"
    reader = "!!PREDICTOR_DBREADER"
    loads.external_input.extend([reader, reader])
    loads.external_output.extend(blobs)
    loads.op.add(input=[reader], output=blobs, name="", type="Load")
    predicts = meta.nets.add(key="PREDICT_NET_TYPE").value
    predicts.name = "resnet"
    predicts.external_input.extend(["data", *blobs])
    predicts.external_output.append("softmax")
    _add_operators(predicts, depths, strides, labels, image_size)
    return meta


def _add_operators(
    net: Any, depths: Sequence[int], strides: Sequence[int], labels: int, image_size: int
) -> None:
    """Add the operators of `ResNet.forward`, in evaluation mode."""
    _convolve(net, "data", "conv1", 7, 2)
    _normalise(net, "conv1", "conv1_spatbn_relu")
    _relu(net, "conv1_spatbn_relu")
    pool = {**_CUDNN, "kernel": 3, "stride": 2, "pad": 1}
    _add(net, "MaxPool", ["conv1_spatbn_relu"], "pool1", pool, "CUDNN")
    before = "pool1"
    number = 0
    size = _halved(_halved(image_size))
    for depth, stride in zip(depths, strides, strict=True):
        for block in range(depth):
            own = stride if block == 0 else 1
            size = _halved(size) if own == 2 else size
            before = _add_block(net, number, before, own, projects=block == 0)
            number += 1
    average = {**_CUDNN, "kernel": size, "stride": 1, "global_pooling": 1}
    _add(net, "AveragePool", [before], "final_avg", average, "CUDNN")
    head = f"last_out_L{labels}"
    _add(net, "FC", ["final_avg", f"{head}_w", f"{head}_b"], head, _NATIVE)
    _add(net, "Softmax", [head], "softmax", _CUDNN, "CUDNN")


def _add_block(net: Any, number: int, before: str, stride: int, *, projects: bool) -> str:
    """Add a bottleneck; return the name of its output."""
    x = before
    for layer, (kernel, own) in enumerate(((1, 1), (3, stride), (1, 1)), 1):
        _convolve(net, x, f"comp_{number}_conv_{layer}", kernel, own)
        normalised = f"comp_{number}_spatbn_{layer}"
        _normalise(net, f"comp_{number}_conv_{layer}", normalised)
        if layer < 3:
            _relu(net, normalised)
        x = normalised
    shortcut = before
    if projects:
        projection = f"shortcut_projection_{number}"
        shortcut = f"{projection}_spatbn"
        _convolve(net, before, projection, 1, stride, pads=False)
        _normalise(net, projection, shortcut)
    total = _SUMS.format(number)
    _add(net, "Sum", [shortcut, x], total, _NATIVE)
    _relu(net, total)
    return total


def _convolve(net: Any, x: str, name: str, kernel: int, stride: int, *, pads: bool = True) -> None:
    values: dict[str, Any] = {"kernel": kernel, **_ORDER, "stride": stride}
    if pads:
        values["pad"] = kernel // 2
    _add(net, "Conv", [x, f"{name}_w"], name, {**values, "exhaustive_search": 0}, "CUDNN")


def _normalise(net: Any, x: str, name: str) -> None:
    ends = ("s", "b", "rm", "riv")
    values = {**_NATIVE, "epsilon": 1e-5, "momentum": 0.9, "is_test": 1}
    _add(net, "SpatialBN", [x, *(f"{name}_{end}" for end in ends)], name, values)


def _relu(net: Any, name: str) -> None:
    _add(net, "Relu", [name], name, _CUDNN, "CUDNN")


def _add(
    net: Any,
    kind: str,
    inputs: Sequence[str],
    output: str,
    values: dict[str, Any],
    engine: str | None = None,
) -> None:
    operator = net.op.add(input=inputs, output=[output], name="", type=kind)
    if engine is not None:
        operator.engine = engine
    for name, value in values.items():
        argument = operator.arg.add(name=name)
        if isinstance(value, list):
            argument.ints.extend(value)
        else:
            setattr(argument, {float: "f", int: "i", bytes: "s"}[type(value)], value)


def _halved(size: int) -> int:
    """Return the size of a map after a stride of two, with padding: rounded up."""
    return -(-size // 2)
