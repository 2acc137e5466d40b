"""Live hooks and replaced methods, which `copy.deepcopy` and `pickle` leave out of a copy.

`copy.deepcopy` and `pickle` copy an object's hooks and attributes with it. A copy, such as an
average of weights, is a plain model: it waits for nothing, and nothing of it is exchanged.

    the original has                     its copy has
    a hook, `LiveHook`                   a function that does nothing
    a replaced method, `PatchedMethod`   its own method, as its class or a script defined it
    a watched flag, `_ScalerFlag`        the flag's value

So a copy keeps nothing of the original alive, and a copied model can be pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch.amp import GradScaler
from torch.optim import Optimizer

_SCALER_FLAG = "_step_supports_amp_scaling"

T = TypeVar("T")
BeforeCall = Callable[[GradScaler], object]
_before: WeakKeyDictionary[Optimizer, BeforeCall] = WeakKeyDictionary()  # a scaler's calls


class LiveHook(partial[Any]):
    """Hook of a live object, whose copy is inert.

    It adds some 30 ns to a call, because `partial` is called without a Python frame.
    """

    @property
    def __name__(self) -> str:
        """None; `torch.jit.script` alone asks for the names of hooks."""
        raise AttributeError(
            "torch.jit.script() can't compile a model after paceline.parallelize(), because of the "
            "hooks on it: use torch.jit.trace(), or script a new model that has loaded the "
            "model's state_dict()."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert_hook, ()


class PatchedMethod(partial[Any]):
    """Method of one object that a function replaces; a copy of the object has its own method.

    It looks like a bound method, as torch's schedulers expect of `optimizer.step`. It has the flag
    of a step that a scheduler has wrapped already, so that schedulers don't wrap it again.

    Args:
        function: called with the object and the method's arguments.
        target: the object.
        name: the method's name.
    """

    __self__: object
    __name__: str
    __func__: Callable[..., Any]
    _before: Any  # what the object itself had, besides its class
    _wrapped_by_lr_sched = True

    def __new__(cls, function: Callable[..., Any], target: object, name: str) -> PatchedMethod:
        """Make one of the target's present method."""

        def method(this: object, *args: object, **kwargs: object) -> object:
            return function(this, *args, **kwargs)

        made = super().__new__(cls, function, target)
        made.__self__ = target
        made.__name__ = name
        made.__func__ = method
        made.__wrapped__ = method.__wrapped__ = getattr(target, name)  # type: ignore[attr-defined]
        made._before = vars(target).get(name)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        if self._before is not None:
            return _itself, (self._before,)
        return getattr, (self.__self__, self.__name__)  # the copy has only its class's by then


def patch(target: object, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one object by `function(target, …)`; return what undoes that."""
    return replace(target, name, PatchedMethod(function, target, name))


def replace(target: object, name: str, value: object) -> Callable[[], None]:
    """Replace an attribute of one object; return what undoes that."""
    attributes = vars(target)
    before = attributes.get(name)

    def undo() -> None:
        attributes.pop(name, None)
        if before is not None:
            attributes[name] = before

    attributes[name] = value
    return undo


def watch_scaler(optimizer: Optimizer, on_scaler_step: Callable[[], None]) -> Callable[[], None]:
    """Call `on_scaler_step` when `GradScaler.step(optimizer)` begins; return what undoes that.

    Autograd doesn't count the writes of the scaler's kernels. But before anything else
    `GradScaler.step` reads a flag of the optimizer, whether its kernel unscales by itself;
    `_ScalerFlag` replaces the flag.
    """
    before = vars(optimizer).get(_SCALER_FLAG)
    return replace(optimizer, _SCALER_FLAG, _ScalerFlag(bool(before), on_scaler_step))


def before_scaler_calls(optimizer: Optimizer, call: BeforeCall) -> Callable[[], None]:
    """Call `call` before an enabled scaler unscales or steps an optimizer.

    A rank without samples has run no backward: it has no gradient until it reduces, and a scaler
    that it never used has no scale. `GradScaler` has no hook. So the class's two methods are
    wrapped, until the process ends. The wrap does nothing for other optimizers, nor for this one
    once the call is undone.

    Args:
        call: gets the scaler.

    Returns:
        what undoes that.
    """
    for name in ("unscale_", "step"):
        plain = getattr(GradScaler, name)
        if not hasattr(plain, "_calls_before"):
            setattr(GradScaler, name, _wrapped(plain))
    _before[optimizer] = call

    def undo() -> None:
        _before.pop(optimizer, None)

    return undo


def _wrapped(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def method(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        call = _before.get(optimizer)
        if call is not None and scaler.is_enabled():
            call(scaler)
        return plain(scaler, optimizer, *args, **kwargs)

    method._calls_before = True  # type: ignore[attr-defined]
    return method


class _ScalerFlag:
    """Optimizer flag that calls `on_read` when a `GradScaler` reads it by `__bool__`."""

    def __init__(self, value: bool, on_read: Callable[[], None]) -> None:
        self._value = value
        self._on_read = on_read

    def __bool__(self) -> bool:
        self._on_read()
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (self._value,)


def _inert_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: object, **__: object) -> None:
    """Leave everything as it is."""


def _itself(value: T) -> T:
    return value
