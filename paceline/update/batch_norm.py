"""BatchNorm on several ranks: running statistics averaged over the ranks, or one global batch.

Without `--sync_bn` each rank normalises by its own batch slice. A running mean is linear in the
batches' means, so the mean of the ranks' running means is the running mean of the ranks' means.
Each rank counts with its share of the global batch; one of weight 0 counts nothing. The statistics
of a step's forward are sent first in its backward (a ResNet's are 0.2% of its gradients) and have
arrived when the next step begins. Settling exchanges nothing: it only installs what has arrived. So
one rank alone may call `state_dict()`. That changes no result, because all ranks install the same
values between the same steps.

With `--sync_bn` the statistics are those of the global batch, on any device and in any dtype.
Forward: each rank has n_r values a channel, of mean m_r and sum of squared deviations M2_r; all
ranks gather all of them and merge them in rank order (Chan, Golub, LeVeque 1979):

    n = sum n_r     mean = sum n_r m_r / n     M2 = sum M2_r + n_r (m_r - mean)^2     var = M2 / n

Backward: rank r's loss is the mean over its own slice and counts with its weight w_r, its share of
the global batch. With x^ = (x - mean) / std, two more sums over the ranks give the gradient of the
rank's own loss:

    G = sum w_r sum g_r     H = sum w_r sum g_r x^_r     (inner sums: over rank r's values)
    dx = weight / std * (g - (G + x^ H) / (w_r n))

So uneven shares are exact, and a rank of weight 0 (its sample is a placeholder, or its loss a mean
over nothing) counts nothing.
Layers wait for their peers within forward and backward. Their collectives use a communicator of
their own: on that of the buckets, ranks that complete buckets in different orders would mix them
up. Statistics are in float32, or float64 where the input is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from paceline.errors import ConfigError, Message, many
from paceline.generation.run import Run
from paceline.timeline.timeline import WAIT_FOR_LAYERS
from paceline.update.first_order import final_gradients, require_plain_backward


class RunningStatistics:
    """Running statistics of a model as one flat tensor, excluding those of `SyncBatchNorm` layers.

    Attributes:
        buffers: the model's, in their order in `flat`.
        flat: (values,) in the widest of their dtypes; None if the model has none.
    """

    def __init__(self, model: nn.Module) -> None:
        owned = [
            (module, buffer)
            for module in model.modules()
            if isinstance(module, _NormBase) and not isinstance(module, SyncBatchNorm)
            for buffer in (module.running_mean, module.running_var)
            if buffer is not None
        ]
        self._modules = [module for module, _ in owned]
        self.buffers = [buffer for _, buffer in owned]
        self._moving: Sequence[bool] = ()  # of each buffer: its module trained when it was packed
        self.flat: Tensor | None = None
        if self.buffers:
            self.flat = torch.cat([buffer.detach().flatten() for buffer in self.buffers])

    def pack(self) -> None:
        """Copy the statistics of this rank."""
        if self.flat is not None:
            torch.cat([buffer.flatten() for buffer in self.buffers], out=self.flat)
            self._moving = [module.training for module in self._modules]

    @torch.no_grad()
    def install(self, mean: Tensor) -> None:
        """Copy the ranks' mean, (values,), into the model; statistics of frozen modules stay."""
        means = self._split(mean)
        if any(self._moving):
            buffers = list(compress(self.buffers, self._moving))
            torch._foreach_copy_(buffers, list(compress(means, self._moving)))

    @torch.no_grad()
    def replace(self, values: Tensor) -> None:
        """Copy values, (values,), into the model, those of frozen modules too."""
        torch._foreach_copy_(self.buffers, self._split(values))

    def _split(self, values: Tensor) -> tuple[Tensor, ...]:
        return torch.split(values, [buffer.numel() for buffer in self.buffers])


class BatchShare:
    """This rank's share of the current step's global batch.

    Attributes:
        weight: of this rank's mean loss in the global one, as in `Synchronizer.begin`; by default
            local samples / global samples. It is 0 if the rank's slice is empty, and it computes on
            a placeholder sample, or if its loss is a mean over nothing: then its samples don't
            count in the statistics. Outside a step it is 1 on all ranks.
        steps_begun: the number of steps begun so far.
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self.steps_begun = 0

    def begin(self, weight: float) -> None:
        """Start a step."""
        self.weight = weight
        self.steps_begun += 1

    def end(self) -> None:
        """End the step."""
        self.weight = 1.0


class LayerCommunicator:
    """Collectives of SyncBatchNorm layers, with this rank's share of the global batch."""

    def __init__(self, run: Run, share: BatchShare) -> None:
        self._run = run
        self.share = share

    def __deepcopy__(self, memo: object) -> LayerCommunicator:
        """Return itself: a copy of the model has the same peers."""
        return self

    def sum(self, tensor: Tensor, operation: str) -> Tensor:
        """Replace `tensor` by its sum over the ranks and return it; collective."""
        context = self._run.context
        communicator = context.group("data", "layers")
        if self.share.steps_begun > 1:  # by now all ranks have compiled their models
            communicator.end_startup()
        ticket = communicator.all_reduce(tensor)
        with context.timeline.span(WAIT_FOR_LAYERS):
            ticket.wait(operation)
        return tensor

    def gather(self, row: Tensor, operation: str) -> Tensor:
        """Return all ranks' rows, (world_size, values), of this rank's `row`, (values,)."""
        communicator = self._run.context.group("data", "layers")
        rows = row.new_zeros(communicator.world_size, row.numel())
        rows[communicator.rank] = row
        return self.sum(rows, operation)  # with zeros: exact


def batch_norms(model: nn.Module, *, every: bool, averaged: bool = False) -> list[str]:
    """Return the names of the BatchNorm layers that are to normalise by the global batch.

    Args:
        every: all of them; otherwise those that are torch's `SyncBatchNorm`, which synchronises
            through torch's default group, and without one not at all.
        averaged: the ranks' weights are averaged, so that there are no global batches.

    Raises:
        ConfigError: such a layer computes something else too, or is of a part of the ranks only, or
            weights are averaged.
    """
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        kind = type(module)
        synchronises = any("Sync" in base.__name__ for base in kind.__mro__)
        if not (every or synchronises):
            continue
        plain = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
        # A subclass that computes something else would lose it without a word.
        if kind.forward not in plain:
            leave = "" if synchronises else Message(", or leave out {--sync_bn}")
            raise ConfigError(
                Message(
                    "the model's {} is of class {}, whose forward computes more than BatchNorm's, "
                    "so it can't be synchronised: use torch's BatchNorm and {--sync_bn}, with what "
                    "else it computes in a module of its own{}.",
                    name,
                    kind.__name__,
                    leave,
                )
            )
        # A group of some ranks is an intent that layers over all ranks can't keep.
        if getattr(module, "process_group", None) is not None:
            raise ConfigError(
                f"the model's {name} is a SyncBatchNorm with a process group of its own, but "
                "Paceline's layers synchronise all ranks: create it without process_group."
            )
        found.append(name or "the model")
    if averaged and (every or found):
        layer = Message("{--sync_bn} was given") if every else f"{found[0]} is a SyncBatchNorm"
        remedy = "leave it out" if every else "make it a BatchNorm"
        raise ConfigError(
            Message(
                "{}, but with {--sync} average workers exchange nothing within a step: {}. Running "
                "statistics are averaged with the weights.",
                layer,
                remedy,
            )
        )
    return found


def synchronised_note(names: Sequence[str]) -> Message:
    """Return the sentence for a model whose SyncBatchNorm layers are replaced.

    Args:
        names: the layers' names; at least one.
    """
    which = names[0] if len(names) == 1 else f"{names[0]} and {many(len(names) - 1, 'more layer')}"
    return Message(
        "the model's SyncBatchNorm ({}) normalises by the global batch, as with {--sync_bn}.", which
    )


def convert_sync_batchnorm(
    model: nn.Module,
    run: Run,
    share: BatchShare,
    *,
    every: bool = True,
) -> nn.Module:
    """Replace the layers that `batch_norms` names; return the model.

    Parameters, buffers, hooks and the names in the state dict stay.

    Args:
        model: changed in place, unless it is a BatchNorm itself.
        run: the run, whose ranks have a communicator for the layers alone.
        share: this rank's share of each step; the replica's.
        every: as of `batch_norms`.

    Raises:
        ConfigError: as `batch_norms`.
    """
    exchange = LayerCommunicator(run, share)
    names = batch_norms(model, every=every)
    converted = {
        module: SyncBatchNorm.like(module, exchange, name or "the model")
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (name or "the model") in names
    }
    # Listed before anything is replaced: the loop changes what `modules()` walks through.
    for parent in [m for m in model.modules() if m not in converted]:
        for name, child in parent.named_children():
            # A layer that is registered in two places stays one layer in both.
            if child in converted:
                setattr(parent, name, converted[child])
    return converted[model] if isinstance(model, _BatchNorm) else model


class SyncBatchNorm(_BatchNorm):
    """BatchNorm with statistics over the global batch, for any number of dimensions.

    The method `like` makes one from a BatchNorm layer.
    """

    _exchange: LayerCommunicator
    _name: str

    @staticmethod
    def like(module: _BatchNorm, exchange: LayerCommunicator, name: str) -> SyncBatchNorm:
        """Make one of a BatchNorm's own parameters, buffers, options and hooks."""
        # Not by the constructor, which would make parameters
        # of its own: an optimizer already has the model's.
        made: SyncBatchNorm = SyncBatchNorm.__new__(SyncBatchNorm)
        made.__dict__.update(module.__dict__)
        made._exchange = exchange
        made._name = name
        return made

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (n, channels, …) by the ranks' common statistics; collective in training.

        Raises:
            ConfigError: there is one value a channel in the whole global batch.
        """
        return self._together(input) if self.training else super().forward(input)

    @_disable_dynamo  # a wait for peers can't be compiled; imports the compiler when called
    def _together(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        require_plain_backward(self._name)
        factor = self._averaging_factor()
        mean, var, count = self._statistics(input)
        if self.running_mean is not None and self.running_var is not None:
            unbiased = var * (count / (count - 1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        normalised: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, var, count, self
        )
        return normalised

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected (n, channels, …), got {input.dim()} dimension(s)")

    def _averaging_factor(self) -> float:
        if self.num_batches_tracked is None:
            return 0.0
        self.num_batches_tracked.add_(1)
        return 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    @torch.no_grad()
    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and biased variance, (channels,), and the number of values a channel."""
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        channels = x.shape[1]
        if not x.numel():
            raise ConfigError(
                f"{self._name}: the batch of this rank is empty: with sync_bn=True a rank without "
                "samples runs forward and backward on any other samples, with samples=0."
            )
        own = x.new_zeros(1 + 2 * channels, dtype=dtype)  # count | mean | M2
        count = x.numel() // channels if self._exchange.share.weight > 0 else 0
        if count:
            nothing = own.new_zeros(2, channels)  # running statistics to update, in their dtype
            # With a factor of 0 it leaves the running statistics
            # that it is given, and returns the batch's.
            mean, var = torch.batch_norm_update_stats(x, nothing[0], nothing[1], 0.0)
            own = torch.cat([own.new_full((1,), count), mean, var * count])
        rows = self._exchange.gather(own, f"the forward of {self._name}")
        counts = rows[:, :1]
        means = rows[:, 1 : 1 + channels]
        m2 = rows[:, 1 + channels :]
        total = counts.sum()
        # With a part of the batch, other ranks have values, too; a device is asked where unknown.
        if count <= 1 and not 0 < self._exchange.share.weight < 1 and total <= 1:
            raise ConfigError(
                f"{self._name}: the global batch has one value per channel, which has no variance: "
                "use a larger batch."
            )
        mean = (counts * means).sum(0) / total
        return mean, (m2 + counts * (means - mean).square()).sum(0) / total, total


class _Normalise(torch.autograd.Function):
    """Autograd function: normalises by given statistics, which depend on all ranks' inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        layer: SyncBatchNorm,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var, count)
        ctx.layer = layer
        # F.batch_norm takes all four in one dtype, and
        # the statistics here are never in half precision.
        scale, shift = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
        return F.batch_norm(x, mean, var, scale, shift, training=False, eps=layer.eps)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            gradients = _Normalise._gradients(ctx, g)
        return final_gradients(gradients, ctx.layer._name)

    @staticmethod
    def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, count = ctx.saved_tensors
        layer: SyncBatchNorm = ctx.layer
        _, sum_gx, sum_g = torch.ops.aten.native_batch_norm_backward(
            g, x, None, mean, var, None, None, False, layer.eps, [False, True, True]
        )
        dx = _input_gradient(g, x, weight, mean, var, count, layer, torch.stack([sum_g, sum_gx]))
        dtype = None if weight is None else weight.dtype
        return (
            dx if ctx.needs_input_grad[0] else None,
            sum_gx.to(dtype) if ctx.needs_input_grad[1] else None,
            sum_g.to(dtype) if ctx.needs_input_grad[2] else None,
            *[None] * 4,
        )


def _input_gradient(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    layer: SyncBatchNorm,
    sums: Tensor,
) -> Tensor:
    """Return dx of this rank's own loss from its `sums`, (2, channels), of g and g x^; collective.

    As  dx = g scale - x slope + shift,  each of them (channels,).
    """
    own = layer._exchange.share.weight
    # A mean over nothing is NaN, and so is its gradient, which counts nothing.
    weighted = sums * own if own > 0 else torch.zeros_like(sums)
    total = layer._exchange.sum(weighted, f"the backward of {layer._name}")
    total = total / (count * own) if own > 0 else torch.zeros_like(total)
    inverse = (var + layer.eps).rsqrt()
    scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
    slope = scale * inverse * total[1]
    shape = (1, -1, *[1] * (x.dim() - 2))
    scale, slope, shift = (t.view(shape) for t in (scale, slope, mean * slope - scale * total[0]))
    return torch.addcmul(torch.addcmul(shift, x, slope, value=-1), g, scale).to(x.dtype)
