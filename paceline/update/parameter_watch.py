"""What a script may do to parameters and gradients while an exchange is under way.

    optimizer.step()                        the update is pending
    average.update_parameters(model)        uses a parameter: the update is installed first
    model(x)                                its hooks wait for what each layer reads

    loss.backward()                         the gradients are this rank's
    clip_grad_norm_(model.parameters())     uses a gradient: it is the global mean first
    optimizer.step()

`ParameterWatch`: in these two gaps a parameter's class is a subclass whose `__torch_function__`
completes what is pending, gives all parameters their own classes back, and repeats the call.
Outside of the gaps nothing is slower. It doesn't find an alias that was made before (`p.data`, a
NumPy array), nor code that gets the tensor without Python, such as TorchScript.

Two guards refuse writes that the watch doesn't find and that would be lost: to a gradient that was
sent, and to a parameter before its update. Autograd counts the writes of each tensor in
`Tensor._version`; comparing the counts costs some 50 microseconds a step for a ResNet-50. Tensors
that share memory share their count, too. So of a gradient that is a view, only a replacement is
detected. Of parameters that share their storage, only the gradients are guarded.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from enum import Enum
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket

_OF_GRADIENT = frozenset(
    getattr(Tensor.grad, name) for name in ("__get__", "__set__", "__delete__")
)
_GET_GRADIENT = getattr(Tensor.grad, "__get__")  # noqa: B009 - a descriptor's own method
_VERSION = attrgetter("_version")
_DTYPE = attrgetter("dtype")
# Uses whose results no update changes.
_CONSTANT = frozenset(
    {
        *(
            getattr(getattr(Tensor, name), "__get__")  # noqa: B009 - a descriptor's own method
            for name in (
                *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf"),
                *("grad_fn", "is_cuda", "is_sparse", "is_meta", "is_quantized", "retains_grad"),
                *("_backward_hooks", "_post_accumulate_grad_hooks"),
            )
        ),
        *(
            getattr(Tensor, name).__set__
            for name in ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
        ),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement),
        *(Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous, Tensor.element_size),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_pinned, Tensor.get_device),
        *(Tensor.requires_grad_, Tensor.register_hook, Tensor.__len__, Tensor.__hash__),
        Tensor.register_post_accumulate_grad_hook,
    }
)


class Gap(Enum):
    """Gap between what a script sees of a step and its result: what is pending.

    Attributes:
        NOTHING: nothing; parameters have their own classes.
        GRADIENTS: the gradients' global means, after backward.
        UPDATES: the parameters' updates, after `optimizer.step()`.
    """

    NOTHING = 0
    GRADIENTS = 1
    UPDATES = 2


class PendingStep(Protocol):
    """Protocol of what a step has left pending, and a use of a parameter completes."""

    def reduce(self) -> None:
        """Make the gradients the global means, before `optimizer.step()`."""

    def settle_for_use(self) -> None:
        """Install the pending updates."""

    def expose_gradients(self, parameter: nn.Parameter) -> None:
        """Install the pending updates, and make the gradients the global means.

        Args:
            parameter: whose gradient is used.
        """


class ParameterWatch:
    """Parameter watch: completes what is pending when code outside of the model uses one.

    Args:
        pending: the step that has left it pending.

    Attributes:
        gap: what is pending.
        left: whether a step has left gradients that aren't exchanged; a script may replace them.
    """

    def __init__(self, pending: PendingStep) -> None:
        self._pending = pending
        self._kinds: dict[type[nn.Parameter], type[nn.Parameter]] = {}
        self._own: list[tuple[nn.Parameter, type[nn.Parameter]]] = []
        self._watched: list[tuple[nn.Parameter, type[nn.Parameter]]] = []
        # Reentrant: what completes an update uses parameters itself.
        self._lock = threading.RLock()  # held while something is completed
        self.gap = Gap.NOTHING
        self.left = False

    def bind(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watch other parameters from now on."""
        self.end()
        self._own = [(p, type(p)) for p in parameters]
        for _, kind in self._own:
            if kind not in self._kinds:
                self._kinds[kind] = _watched(kind, self)
        self._watched = [(p, self._kinds[kind]) for p, kind in self._own]

    def begin(self, gap: Gap) -> None:
        """Complete what is pending when a parameter is used from now on."""
        with self._lock:
            # With the first gap only: the classes of the second are the same ones.
            if self.gap is Gap.NOTHING:
                for p, kind in self._watched:
                    p.__class__ = kind
            self.gap = gap

    def end(self) -> None:
        """Watch nothing any more; return once another thread has completed what it uses."""
        # Looked at without the lock first: outside of the gaps nothing is to be slower.
        if self.gap is not Gap.NOTHING:
            with self._lock:
                self.gap = Gap.NOTHING
                for p, kind in self._own:
                    p.__class__ = kind

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Use parameters inside as they are."""
        with self._lock:
            gap = self.gap
            self.end()
            try:
                yield
            finally:
                if gap is not Gap.NOTHING:
                    self.begin(gap)

    def before_use(self, function: Any, parameter: nn.Parameter | None) -> bool:
        """Complete what a use needs; return whether the parameters have their own classes.

        Args:
            function: the function of torch, method or property that is called.
            parameter: its first argument, if that is watched.
        """
        of_gradient = function in _OF_GRADIENT
        with self._lock:  # another thread may be completing it
            if self.gap is Gap.GRADIENTS and of_gradient:
                # Such gradients are refused where they are read;
                # a script that zeroes or replaces them is right.
                if not self.left or function == _GET_GRADIENT:
                    with self._completing():
                        self._pending.reduce()
            elif self.gap is Gap.UPDATES and of_gradient:
                if function == _GET_GRADIENT and _has_gradient(parameter):
                    assert parameter is not None
                    with self._completing():
                        self._pending.expose_gradients(parameter)
            elif self.gap is Gap.UPDATES and not of_gradient and function not in _CONSTANT:
                with self._completing():
                    self._pending.settle_for_use()
            return self.gap is Gap.NOTHING

    @contextmanager
    def _completing(self) -> Iterator[None]:
        """Let the block complete what is pending; its uses of parameters aren't the script's."""
        # First, or what completes it would be taken for a use by the script.
        self.end()
        # The use may be inside of a transform of `torch.func`, which mustn't transform the update.
        with (
            temporarily_clear_interpreter_stack(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield


class _Watched:
    """Mixin of a watched parameter's class; copies of the parameter have its own class."""

    _watch: ParameterWatch

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        watch = self._watch
        watch.before_use(deepcopy, None)
        with watch.paused():
            return deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        watch = self._watch
        watch.before_use(deepcopy, None)
        with watch.paused():
            return self.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        parameter: Any = args[0] if args and isinstance(args[0], _Watched) else None
        if cls._watch.before_use(function, parameter):
            return function(*args, **(kwargs or {}))
        # A constant's use: the class stays watched, and the call mustn't come back here.
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def _watched(kind: type[nn.Parameter], watch: ParameterWatch) -> type[nn.Parameter]:
    """Make the class of watched parameters whose own class is `kind`."""
    metaclass: Any = type(kind)
    made: type[nn.Parameter] = metaclass(
        # Under the own class's name, which messages and prints show.
        kind.__name__,
        (_Watched, kind),
        {"_watch": watch, "__module__": __name__},
    )
    return made


def _has_gradient(parameter: nn.Parameter | None) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter is not None and parameter.grad is not None


class ParameterGuard:
    """Guard of parameters whose update is pending: refuses writes that the update would undo."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        uses = Counter(
            p.untyped_storage().data_ptr() for bucket in buckets for p in bucket.parameters
        )
        self._guarded = [  # by bucket, those that share no memory, by their names
            {
                name: p
                for name, p in zip(bucket.names, bucket.parameters, strict=True)
                if uses[p.untyped_storage().data_ptr()] == 1 and not p._is_view()
            }
            for bucket in buckets
        ]
        self._noted: dict[int, list[Any]] = {}

    def note(self) -> None:
        """Take the present versions of all parameters as those that count."""
        self._noted = {n: _marks_of(guarded.values()) for n, guarded in enumerate(self._guarded)}

    def check(self, unit: Sequence[Bucket]) -> None:
        """Compare the parameters of some buckets with their noted versions, and forget these.

        Raises:
            ConfigError: a parameter was written or converted.
        """
        for bucket in unit:
            guarded = self._guarded[bucket.index]
            noted = self._noted.pop(bucket.index, None)
            # A bucket that wasn't noted is one whose update isn't deferred.
            if noted is not None and (now := _marks_of(guarded.values())) != noted:
                raise _late_write(_first_difference(list(guarded), now, noted))


class GradientGuard:
    """Guard of gradients that were sent: refuses writes that the exchange doesn't see.

    Args:
        parameters: the gradients' parameters, which are indexed 0, 1, …
        names: the parameters' names.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._parameters = parameters
        self._names = names
        self._noted: dict[range, tuple[Sequence[Tensor], list[Any]]] = {}

    def note(self, indices: range, gradients: Sequence[Tensor]) -> None:
        """Take the present versions of some gradients as those that count.

        Args:
            indices: of their parameters.
            gradients: the gradients, one a parameter.
        """
        self._noted[indices] = gradients, _marks_of(gradients)

    def check(self, step: int) -> None:
        """Compare all noted gradients with the parameters' present ones, and forget these.

        Args:
            step: the present step's number, for the error.

        Raises:
            ConfigError: a gradient was written, converted, replaced or removed.
        """
        noted = self._noted
        self._noted = {}
        for indices, (gradients, marks) in noted.items():
            now = [self._parameters[index].grad for index in indices]
            same = [*map(is_, now, gradients)]
            names = self._names[indices.start : indices.stop]
            if not all(same):
                raise _lost_write(names[same.index(False)], step)
            if (written := _marks_of(gradients)) != marks:
                views = [gradient._is_view() for gradient in gradients]  # they count others' writes
                written = _without(views, written)
                marks = _without(views, marks)
                if written != marks:
                    raise _lost_write(_first_difference(names, written, marks), step)

    def clear(self) -> None:
        """Forget all noted gradients."""
        self._noted = {}


def _marks_of(tensors: Collection[Tensor]) -> list[Any]:
    """Return what a write or a conversion changes: the tensors' versions, and then their dtypes."""
    return [*map(_VERSION, tensors), *map(_DTYPE, tensors)]


def _without(views: Sequence[bool], marks: Sequence[Any]) -> list[Any]:
    """Return the marks of some tensors, without the versions of views."""
    versions = [None if view else n for n, view in zip(marks, views, strict=False)]
    return [*versions, *marks[len(views) :]]


def _first_difference(names: Sequence[str], now: Sequence[Any], then: Sequence[Any]) -> str:
    """Return the name of the first tensor whose marks differ."""
    differ = [a != b for a, b in zip(now, then, strict=True)]
    return names[differ.index(True) % len(names)]


def _lost_write(name: str, step: int) -> ConfigError:
    """Return the error for a gradient that was written after it was sent."""
    return ConfigError(
        f"the gradient of {name} was modified between backward and optimizer.step() in step "
        f"{step}, after it was sent: to modify gradients, call reduce() after backward, and modify "
        "them after reduce(); call zero_grad() only after optimizer.step()."
    )


def _late_write(name: str) -> ConfigError:
    """Return the error for a parameter that was written before its update was installed."""
    return ConfigError(
        f"{name} was written while its update was still pending: optimizer.step() starts the "
        "update, and the next forward installs it. Call settle() after optimizer.step(), then "
        "write."
    )
