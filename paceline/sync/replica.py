"""Binds a model and its optimizer to a synchronizer: who calls the four instants, and when.

    with replica.step(number, weight):      begin
        loss = criterion(model(x), y)       before_read: a pre-hook on every reader of parameters
        loss.backward()                     gradient_ready: a hook after each parameter's gradient
        optimizer.step()                    end
        optimizer.zero_grad()

`optimizer.step()` freezes the hyperparameters and returns; the update itself happens in the next
forward, layer by layer, as results arrive, or in `settle`. `eval()`, `state_dict()` and
`load_state_dict()`, the model's and the optimizer's, settle first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from paceline.errors import ConfigError
from paceline.sync.bucket import Bucket
from paceline.sync.readers import ReaderLesson, Readers, owners
from paceline.sync.synchronizer import Synchronizer


class Replica:
    """This rank's copy of the model, kept in step with the others'."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, synchronizer: Synchronizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._synchronizer = synchronizer
        self._names = {p: name for name, p in model.named_parameters()}
        self._bucket_of = {p: b for b in synchronizer.buckets for p in b.parameters}
        self._missing: dict[Bucket, set[nn.Parameter]] = {}
        self._number: int | None = None  # the step that runs
        self._exchanging = True
        self._prompt: tuple[Bucket, ...] = ()  # read where nobody can wait: updated in `end`
        self._handles: list[RemovableHandle] = []
        self._reader_handles: list[RemovableHandle] = []
        self._wait_in(owners(model))
        self._lesson: ReaderLesson | None = ReaderLesson(model)
        for p in self._bucket_of:
            self._handles.append(p.register_post_accumulate_grad_hook(self._gradient_done))
        self._settle_before_states()
        optimizer_step = optimizer.step
        _patch(optimizer, "step", lambda _, closure=None: self._end(optimizer_step, closure))
        _patch(model, "train", self._train)

    def __deepcopy__(self, memo: object) -> Replica:
        """Stay one: a copy of the model (an average of weights, say) is nobody's replica."""
        return self

    @contextmanager
    def step(self, number: int, weight: float) -> Iterator[None]:
        """Run a step; `weight` is local samples / global samples.

        A block that ends without `optimizer.step()` ends the step without an update.

        Raises:
            ConfigError: the block broke a rule of the exchange; names the remedy.
            CommError: a peer was lost, or silent.
        """
        self._number = number
        self._missing = {b: set(b.parameters) for b in self._synchronizer.buckets}
        self._synchronizer.begin(number, weight)
        yield
        if self._number is not None:
            self._synchronizer.abandon(number)
            self._done()
        if self._lesson is not None:
            self._learn(self._lesson)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: gradients of backwards inside stay here until one outside sends the sum."""
        self._exchanging = False
        try:
            yield
        finally:
            self._exchanging = True

    def reduce(self) -> None:
        """Wait, and make every `.grad` the mean over the global batch."""
        self._synchronizer.reduce()

    def settle(self) -> None:
        """Make parameters and running statistics final and equal everywhere."""
        self._synchronizer.settle()

    def close(self) -> None:
        """Take the hooks off model and optimizer and close the synchronizer."""
        for handle in [*self._handles, *self._reader_handles]:
            handle.remove()
        self._optimizer.__dict__.pop("step", None)
        self._model.__dict__.pop("train", None)
        self._synchronizer.close()

    def _wait_in(self, readers: Readers) -> None:
        """Make each reader wait for its buckets, and the model's end for what is left."""
        for handle in self._reader_handles:
            handle.remove()
        self._reader_handles.clear()
        for module, parameters in readers.items():
            known = [self._bucket_of[p] for p in parameters if p in self._bucket_of]
            hook = partial(self._before_forward, tuple(dict.fromkeys(known)))
            self._reader_handles.append(module.register_forward_pre_hook(hook, prepend=True))
        self._reader_handles.append(self._model.register_forward_hook(self._after_forward))

    def _learn(self, lesson: ReaderLesson) -> None:
        """Take from the first step who reads what."""
        self._wait_in(lesson.finish())
        self._lesson = None
        seen = lesson.seen
        self._prompt = tuple(
            bucket
            for bucket in self._synchronizer.buckets
            if any(p not in seen and p not in self._missing[bucket] for p in bucket.parameters)
        )
        for bucket in self._prompt:
            self._synchronizer.before_read(bucket)

    def _before_forward(self, buckets: tuple[Bucket, ...], module: nn.Module, args: object) -> None:
        for bucket in buckets:
            self._synchronizer.before_read(bucket)

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        self._before_forward(self._synchronizer.buckets, module, args)

    def _gradient_done(self, parameter: Tensor) -> None:
        if not self._exchanging or self._number is None:
            return
        assert isinstance(parameter, nn.Parameter)
        bucket = self._bucket_of[parameter]
        missing = self._missing[bucket]
        if parameter not in missing:
            raise ConfigError(
                f"the gradient of {self._names[parameter]} was completed twice in step "
                f"{self._number}: put all backwards of a step but the last into no_sync(), and "
                "call activation checkpointing with use_reentrant=False."
            )
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ConfigError(
                f"the gradient of {self._names[parameter]} is sparse, and sparse gradients can't "
                "be exchanged: make its layer with sparse=False."
            )
        missing.remove(parameter)
        if not missing:
            self._synchronizer.gradient_ready(bucket)

    def _end(
        self, optimizer_step: Callable[..., Any], closure: Callable[[], Any] | None = None
    ) -> Any:
        """Stand in for `optimizer.step()`: inside a step, end it."""
        if self._number is None:
            return optimizer_step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_strangers()
        self._synchronizer.end(self._number)
        self._done()
        for bucket in self._prompt:
            self._synchronizer.before_read(bucket)
        return loss

    def _done(self) -> None:
        self._number = None
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it

    def _refuse_strangers(self) -> None:
        """Refuse a gradient that nobody exchanges and that a plain step would have used."""
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p not in self._bucket_of:
                    name = self._names.get(p, f"a parameter of shape {tuple(p.shape)}")
                    raise ConfigError(
                        f"{name} has a gradient that isn't exchanged: it was unfrozen, or given to "
                        "the optimizer, after the ranks began, or isn't the model's; let model and "
                        "optimizer have it, unfrozen, from the start."
                    )

    def _settle_before_states(self) -> None:
        def settle_first(*_: object) -> None:
            self.settle()

        for module in self._model.modules():
            self._handles.append(module.register_state_dict_pre_hook(settle_first))
            self._handles.append(module.register_load_state_dict_pre_hook(settle_first))
        self._handles.append(self._optimizer.register_state_dict_pre_hook(settle_first))
        self._handles.append(self._optimizer.register_load_state_dict_pre_hook(settle_first))

    def _train(self, model: nn.Module, mode: bool = True) -> nn.Module:
        """Stand in for `model.train()`, which `eval()` calls too."""
        if not mode and model is self._model:
            self.settle()
        return type(model).train(model, mode)


def _patch(target: object, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of one object; it stays a bound method, as torch's schedulers expect."""

    def method(this: object, *args: object, **kwargs: object) -> object:
        return function(this, *args, **kwargs)

    method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # `_done` tells schedulers
    setattr(target, name, MethodType(method, target))
