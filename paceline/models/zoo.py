"""Models by name: the zoo's, other packages' (`torchvision:resnet18`), and a user's own.

A user's own is `package.module:function`.

A user's own function gets `num_labels=` and `num_channels=`, each only if it takes an argument of
that name, and returns an `nn.Module`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.models.error_origin import described, is_ours
from paceline.models.other_zoos import ZOOS, ZooEntry, zoo_of
from paceline.models.resnet import BasicBlock, Bottleneck, ResNet

MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": partial(ResNet, BasicBlock, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, BasicBlock, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3)),
    "resnet101": partial(ResNet, Bottleneck, (3, 4, 23, 3)),
    "resnet152": partial(ResNet, Bottleneck, (3, 8, 36, 3)),
    "resnet20": partial(ResNet, BasicBlock, (3, 3, 3), small=True),
    "resnet56": partial(ResNet, BasicBlock, (9, 9, 9), small=True),
}

# Top-1 accuracies on ImageNet-1K of torchvision's weights IMAGENET1K_V1, which are of the same
# networks; on CIFAR-10, He et al. 2016, https://arxiv.org/abs/1512.03385, table 6.
_PUBLISHED = {
    "resnet18": ("ImageNet-1K", 1000, 0.69758),
    "resnet34": ("ImageNet-1K", 1000, 0.73314),
    "resnet50": ("ImageNet-1K", 1000, 0.76130),
    "resnet101": ("ImageNet-1K", 1000, 0.77374),
    "resnet152": ("ImageNet-1K", 1000, 0.78312),
    "resnet20": ("CIFAR-10", 10, 0.9125),
    "resnet56": ("CIFAR-10", 10, 0.9303),
}
_OTHERS = [f"{name}:NAME" for name in ZOOS]


def own_entries() -> list[ZooEntry]:
    """List the models of this zoo."""
    entries = []
    for name, (data, labels, accuracy) in _PUBLISHED.items():
        count = count_parameters(name, labels)
        entries.append(ZooEntry(name=name, parameters=count, accuracy=accuracy, data=data))
    return entries


def count_parameters(name: str, num_labels: int) -> int:
    """Return the number of a model's trained values, without memory for them.

    Raises:
        ConfigError: as `build_model`.
    """
    with torch.device("meta"):
        model = build_model(name, num_labels=num_labels, num_channels=3)
    return sum(parameter.numel() for parameter in model.parameters())


def build_model(name: str, *, num_labels: int, num_channels: int) -> nn.Module:
    """Make a model with new weights, a pure function of torch's seed for the zoo's.

    Args:
        name: a key of `MODELS`, a name of another zoo, or `package.module:function`.
        num_labels: classes.
        num_channels: channels of an image.

    Raises:
        ConfigError: there is no such model or function, its module can't be imported, it needs
            other arguments, it fails, or it returns something else than a module.
    """
    make = model_factory(name, num_labels=num_labels, num_channels=num_channels)
    try:
        model = make()
    except Exception as error:  # the user's code may raise anything
        if is_ours(error):
            raise
        raise ConfigError(
            f"Model {name}: the function failed with {described(error)}: correct it; to debug it, "
            f"call the function with num_labels={num_labels}."
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"Model {name} returned {type(model).__name__}: the function must return a "
            "torch.nn.Module."
        )
    return model


def model_factory(name: str, *, num_labels: int, num_channels: int) -> Callable[[], object]:
    """Find what makes a model, without making it; arguments and errors as in `build_model`."""
    if (other := zoo_of(name)) is not None:
        zoo, own = other
        return zoo.factory(own, num_labels, num_channels)
    factory = _import(name) if ":" in name else MODELS.get(name)
    if factory is None:
        near = get_close_matches(name, MODELS, n=2)
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"There is no model {name}: {guess}The zoo has {', '.join(MODELS)}; give your own as "
            f"package.module:function, or one of another package as {', '.join(_OTHERS)}."
        )
    offered = {"num_labels": num_labels, "num_channels": num_channels}
    return partial(factory, **_accepted(name, factory, offered))


def _import(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"Model {name}: give your own model as package.module:function.")
    try:
        module = import_module(module_name)
    except Exception as error:  # a module's code may raise anything
        raise ConfigError(
            f"Model {name}: module {module_name} can't be imported, {described(error)}; it must be "
            "installed, or in a folder of PYTHONPATH, and have no errors."
        ) from error
    if not callable(getattr(module, function_name, None)):
        own = [
            name
            for name, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        has = f"it has {', '.join(own[:5])}" if own else "it defines none"
        raise ConfigError(
            f"Model {name}: module {module_name} has no function {function_name}; {has}."
        )
    function: Callable[..., Any] = getattr(module, function_name)
    return function


def _accepted(name: str, factory: Callable[..., Any], offered: dict[str, int]) -> dict[str, int]:
    """Leave out what the function doesn't take."""
    signature = inspect.signature(factory)
    parameters = signature.parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    given = {key: value for key, value in offered.items() if takes_all or key in named}
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ConfigError(
            f"Model {name}: {error}; give the function's other arguments default values, because "
            "it is called with num_labels and num_channels only."
        ) from error
    return given
