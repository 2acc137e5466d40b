"""State trees as bytes: a JSON header, and the tensors' memory behind it.

    8 bytes          length of the header, little-endian
    header           JSON: the tree, in which a tensor is its dtype, shape, strides and offset
    tensors          each at a multiple of 16 bytes from the start

Reading it runs no code of the sender's, as unpickling does, and reads nothing outside the bytes.
Packing copies only tensors that aren't dense; unpacked tensors are views of the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CommError, ConfigError

_LENGTH = 8  # bytes of the header's length
# That of complex128: torch views memory as a dtype only at a multiple of its size.
_ALIGNED = 16  # bytes: the largest value of a tensor
# The bytes are a peer's, and each level is a call of `_decoded`.
_MAX_DEPTH = 64  # of a tree
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128),
    )
}


def pack_state(state: Any) -> list[memoryview]:
    """Return a tree as chunks of bytes to be joined: a header, and views of the tensors' memory.

    Args:
        state: tree of dicts, lists, tuples, tensors of this machine's memory, and plain values.

    Raises:
        ConfigError: it has other values.
    """
    tensors: list[Tensor] = []
    offset = 0

    def encoded(value: Any) -> Any:
        nonlocal offset
        if isinstance(value, Tensor):
            tensor = _dense(value)
            entry = [*_shape_of(tensor), offset]
            tensors.append(tensor)
            offset += _padded(tensor.nbytes)
            return {"tensor": entry}
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Mapping):
            return {"dict": [[encoded(key), encoded(entry)] for key, entry in value.items()]}
        if isinstance(value, tuple):
            return {"tuple": [encoded(entry) for entry in value]}
        if isinstance(value, list):
            return [encoded(entry) for entry in value]
        raise _refused(f"{type(value).__module__}.{type(value).__qualname__}")

    header = json.dumps(encoded(state), separators=(",", ":")).encode()
    start = _padded(_LENGTH + len(header))
    chunks = [memoryview((len(header).to_bytes(_LENGTH, "little") + header).ljust(start, b" "))]
    for tensor in tensors:
        chunks.append(_bytes_of(tensor))
        if padding := _padded(tensor.nbytes) - tensor.nbytes:
            chunks.append(memoryview(bytes(padding)))
    return [chunk for chunk in chunks if chunk.nbytes]


def unpack_state(data: bytearray | memoryview | bytes) -> Any:
    """Return the tree of such bytes; its tensors are views of them.

    Raises:
        CommError: the bytes are something else.
    """
    view = memoryview(data)
    view = view if view.nbytes and not view.readonly else memoryview(bytearray(view))
    try:
        length = int.from_bytes(view[:_LENGTH], "little")
        if length > view.nbytes - _LENGTH:
            raise ValueError("the header is longer than the data")
        header = json.loads(view[_LENGTH : _LENGTH + length].tobytes())
        return _decoded(header, view[_padded(_LENGTH + length) :], _MAX_DEPTH)
    except (ValueError, TypeError, KeyError, RecursionError, RuntimeError, OverflowError) as error:
        raise CommError(
            "A copy of another rank's state can't be read: start all machines with the same "
            "version of Paceline."
        ) from error


def _decoded(value: Any, tensors: memoryview, depth: int) -> Any:
    if not depth:
        raise ValueError("the tree is too deep")
    if isinstance(value, list):
        return [_decoded(entry, tensors, depth - 1) for entry in value]
    if not isinstance(value, dict):
        return value
    # A dict of the tree is a list of pairs here, since
    # JSON's keys are texts and a state's are numbers, too.
    ((kind, content),) = value.items()
    if kind == "tensor":
        return _tensor(tensors, *content)
    if kind == "tuple":
        return tuple(_decoded(entry, tensors, depth - 1) for entry in content)
    if kind == "dict":
        pairs = [[_decoded(each, tensors, depth - 1) for each in pair] for pair in content]
        return dict(pairs)
    raise ValueError(f"{kind!r} is no kind of value")


def _tensor(
    data: memoryview, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int
) -> Tensor:
    """View a tensor in the bytes; its values must lie in them, and be dense."""
    kind = _DTYPES[dtype]
    count = prod(shape)
    end = offset + count * kind.itemsize
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if min([offset, *shape, *strides]) < 0 or end > data.nbytes or (count and last != count - 1):
        raise ValueError("a tensor lies outside the data")
    if not count:
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=kind)
    flat = torch.frombuffer(data, dtype=kind, count=count, offset=offset)
    return flat.as_strided(tuple(shape), tuple(strides))


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if its memory has gaps or is another device's."""
    tensor = tensor.detach().cpu()
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return tensor if dense else tensor.contiguous()


def _shape_of(tensor: Tensor) -> tuple[str, list[int], list[int]]:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES or tensor.layout is not torch.strided:
        raise _refused(f"tensor of {name} ({tensor.layout})")
    return name, list(tensor.shape), list(tensor.stride())


def _bytes_of(tensor: Tensor) -> memoryview:
    """View the memory of a dense tensor."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _refused(kind: str) -> ConfigError:
    return ConfigError(
        f"The optimizer's state has a {kind}, of which another rank can't have a copy: retain "
        "plain values and dense tensors there, or disable in-memory snapshots."
    )


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
