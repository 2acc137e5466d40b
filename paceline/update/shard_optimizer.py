"""Updates of a rank's shards: torch's own optimizer over the pieces of parameters that lie there.

    bucket   [ a              | b         | c                  ]
    shards   [ rank 0              | rank 1                    ]
    pieces   [ a              | b  ] [ b  | c                  ]     one parameter each

A piece is flat, in the order in which its parameter lies in memory. The optimizer's state is that
of this rank's pieces, a part of 1/N; `gather` puts it together.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.communicator import Communicator, gather_all
from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket, like
from paceline.update.parameter_guard import ParameterGuard
from paceline.update.sub_optimizer import SubOptimizer
from paceline.update.updater import ELEMENTWISE

_SCALARS = frozenset({"step", "eta", "mu", "mu_product"})  # of a parameter, whatever its size


@dataclass(frozen=True, kw_only=True, eq=False)
class _Piece:
    """The part of a parameter that lies in this rank's shard.

    Attributes:
        bucket, place: of the parameter.
        start, stop: its values of the parameter's.
        at: where it begins in the shard.
        values: the optimizer's parameter, (stop - start,).
    """

    bucket: int
    place: int
    start: int
    stop: int
    at: int
    values: nn.Parameter


class ShardOptimizer:
    """Updates this rank's shard of each bucket.

    Args:
        optimizer: whose kind and hyperparameters updates have.
        buckets: all.

    Raises:
        ConfigError: the optimizer doesn't treat every value by itself.
    """

    def __init__(self, optimizer: Optimizer, buckets: Sequence[Bucket]) -> None:
        if type(optimizer) not in ELEMENTWISE:
            kinds = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
            raise ConfigError(
                f"--update sharded can't divide {type(optimizer).__name__}, whose update of a "
                f"value may need others: give one of {kinds}, or --update replicated."
            )
        self._optimizer, self._buckets = optimizer, buckets
        self._state: dict[Tensor, Any] = defaultdict(dict)
        self._pieces: dict[int, list[_Piece]] = {}
        self._parts: dict[int, SubOptimizer] = {}
        self._memory: dict[int, Tensor] = {}
        self._strides = [[p.stride() for p in bucket.parameters] for bucket in buckets]
        self._guard = ParameterGuard([(bucket,) for bucket in buckets])
        self._gathering = False
        self._undo = [
            optimizer.register_state_dict_pre_hook(self._refuse_state).remove,
            optimizer.register_load_state_dict_post_hook(lambda _: self.deal()).remove,
        ]

    def own(self, index: int, shard: slice, memory: Tensor) -> None:
        """Take a bucket's shard: its values, and where its sums are, (values,)."""
        bucket, self._memory[index] = self._buckets[index], memory
        ends = list(accumulate(p.numel() for p in bucket.parameters))
        pieces = self._pieces[index] = []
        for place, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
            a, b = max(first, shard.start), min(last, shard.stop)
            if a < b:
                values = nn.Parameter(memory.new_empty(b - a))
                pieces.append(
                    _Piece(
                        bucket=index,
                        place=place,
                        start=a - first,
                        stop=b - first,
                        at=a - shard.start,
                        values=values,
                    )
                )
        if pieces:
            groups = {piece.values: bucket.group for piece in pieces}
            self._parts[index] = SubOptimizer(self._optimizer, groups, self._state)

    def deal(self) -> None:
        """Take this rank's part of the optimizer's state, and leave it nothing."""
        for pieces in self._pieces.values():
            for piece in pieces:
                parameter = self._parameter(piece)
                self._state[piece.values] = {
                    name: _dealt(name, value, parameter, piece)
                    for name, value in self._optimizer.state.get(parameter, {}).items()
                }
        self._clear()

    def load(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Take this rank's part of what a plain state dict has of each parameter, by its number."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for number, state in states.items():
            p = parameters[number]
            self._optimizer.state[p] = {
                name: value.to(p.device) if _lies_with(name, value, p) else value
                for name, value in state.items()
            }
        self.deal()

    def close(self) -> None:
        """Let go of the optimizer."""
        while self._undo:
            self._undo.pop()()

    def install(self, bucket: Bucket, values: Sequence[Tensor | None]) -> None:
        """Copy updated parameters.

        Raises:
            ConfigError: a parameter was written since `freeze`, or lies otherwise in memory now.
        """
        self._guard.refuse((bucket,))
        self._refuse_other_strides(bucket)
        with torch.inference_mode(False), torch.no_grad():
            for p, value in zip(bucket.parameters, values, strict=True):
                assert value is not None
                p.copy_(value)

    def freeze(self) -> None:
        """Take the optimizer's present hyperparameters for the updates to come."""
        self._guard.freeze()
        for part in self._parts.values():
            part.freeze()

    def cut(self, index: int) -> list[Tensor | None]:
        """Copy the gradients of a bucket's pieces as they are, to be given to `update`."""
        cut: list[Tensor | None] = []
        for piece in self._pieces.get(index, ()):
            parameter = self._parameter(piece)
            whole = None if parameter.grad is None else _flat_as(parameter, parameter.grad)
            cut.append(None if whole is None else whole[piece.start : piece.stop])
        return cut

    def update(
        self, index: int, used: Sequence[int], given: Sequence[Tensor | None] | None
    ) -> None:
        """Replace the sums of this rank's shard by updated parameters.

        Args:
            index: the bucket's.
            used: (parameters,), 0 where nobody used one, if gradients are the sums.
            given: gradients in their place, one a piece.
        """
        memory = self._memory[index]
        with torch.no_grad():
            for number, piece in enumerate(self._pieces[index]):
                parameter = self._parameter(piece)
                piece.values.copy_(_flat(parameter)[piece.start : piece.stop])
                place = memory[piece.at :][: piece.stop - piece.start]
                if given is None:
                    piece.values.grad = place if used[piece.place] else None
                else:
                    piece.values.grad = given[number]
        if index in self._parts:
            self._parts[index].step()
        with torch.no_grad():
            for piece in self._pieces[index]:
                memory[piece.at :][: piece.stop - piece.start].copy_(piece.values)
                piece.values.grad = None

    def gather(self, communicator: Communicator) -> dict[str, Any] | None:
        """Return the whole optimizer's plain state dict on rank 0, None elsewhere; collective.

        Raises:
            CommError: a peer was lost, or silent.
            ConfigError: a parameter lies otherwise in memory now.
        """
        for bucket in self._buckets:
            self._refuse_other_strides(bucket)
        data = io.BytesIO()
        mine = [
            (piece.bucket, piece.place, piece.start, piece.stop, dict(self._state[piece.values]))
            for pieces in self._pieces.values()
            for piece in pieces
        ]
        torch.save(mine, data)
        told = torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)
        device = self._buckets[0].parameters[0].device
        what = "the gathering of the optimizer's state, for which all ranks must come"
        parts = gather_all(communicator, told.to(device), what)
        if communicator.rank > 0:
            return None
        for part in parts:
            file = io.BytesIO(part.cpu().numpy().tobytes())
            for bucket, place, start, stop, state in torch.load(file, weights_only=True):
                self._put_together(self._buckets[bucket].parameters[place], start, stop, state)
        self._gathering = True
        plain: dict[str, Any] = self._optimizer.state_dict()
        self._gathering = False
        self._clear()
        return plain

    def _put_together(
        self, parameter: nn.Parameter, start: int, stop: int, state: Mapping[str, Any]
    ) -> None:
        if not any(p is parameter for g in self._optimizer.param_groups for p in g["params"]):
            return  # it was taken from the optimizer
        whole = self._optimizer.state[parameter]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 1:
                if name not in whole:
                    whole[name] = torch.empty_like(parameter, dtype=value.dtype)
                flat = _flat(whole[name])
                flat[start:stop] = value
                if flat.untyped_storage().data_ptr() != whole[name].untyped_storage().data_ptr():
                    whole[name].copy_(like(parameter, flat))
            else:
                whole[name] = value

    def _refuse_other_strides(self, bucket: Bucket) -> None:
        """Look whether pieces, which are parts of a memory's order, are still where they were."""
        known = zip(bucket.parameters, bucket.names, self._strides[bucket.index], strict=True)
        for p, name, stride in known:
            if p.stride() != stride:
                raise ConfigError(
                    f"{name} got another memory format, and its shards were dealt out in the one "
                    "before: call model.to(memory_format=…) before "
                    "parallelize(), or give --update replicated."
                )

    def _clear(self) -> None:
        """Leave the optimizer the state of what isn't exchanged: frozen parameters."""
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                self._optimizer.state.pop(parameter, None)

    def _refuse_state(self, _: Optimizer) -> None:
        if not self._gathering:
            raise ConfigError(
                "optimizer.state_dict() would have this rank's share only, with update='sharded': "
                "call world.checkpoint(), whose file has the whole state."
            )

    def _parameter(self, piece: _Piece) -> nn.Parameter:
        return self._buckets[piece.bucket].parameters[piece.place]


def _dealt(name: str, value: Any, parameter: Tensor, piece: _Piece) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not _lies_with(name, value, parameter):
        return value.clone()
    return _flat_as(parameter, value)[piece.start : piece.stop].clone()


def _lies_with(name: str, value: Any, parameter: Tensor) -> bool:
    """Tell whether a state has a value for each of its parameter's."""
    return isinstance(value, Tensor) and name not in _SCALARS and value.shape == parameter.shape


def _flat(tensor: Tensor) -> Tensor:
    """View a tensor, or copy it, (numel,), in the order of `like`."""
    tensor = tensor.detach()
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    if tensor.is_contiguous() or not dense:
        return tensor.reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def _flat_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Copy a tensor, (numel,), in the order of its parameter."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    like(parameter, flat).copy_(tensor)
    return flat
