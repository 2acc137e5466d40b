"""Models of other packages, by `torchvision:NAME`, `timm:NAME` and `hf:NAME_OR_FOLDER`.

Each makes a model with random weights for any number of classes, and knows published weights, which
it downloads, or finds in its package's cache. Nothing is imported before a model is asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.models.error_origin import described

PRETRAINED = "pretrained"
"""What selects a model's default weights."""


@dataclass(frozen=True, kw_only=True)
class ZooEntry:
    """Model of a zoo.

    Attributes:
        name: as --model takes it.
        parameters: number of trained values, for the data set's classes; None: not known without
            making the model.
        accuracy: published top-1 accuracy, a fraction; None: none is known.
        data: the data set of this accuracy.
        weights: name of the published weights, as --weights takes it; "": there are none.
    """

    name: str
    parameters: int | None = None
    accuracy: float | None = None
    data: str = ""
    weights: str = ""


class OtherZoo(Protocol):
    """Models of a package.

    Attributes:
        extra: of Paceline, which installs the package.
        package: its name.
    """

    extra: str
    package: str

    def factory(self, name: str, num_labels: int, num_channels: int) -> Callable[[], nn.Module]:
        """Find what makes a model.

        Raises:
            ConfigError: there is no such model, or it has no such inputs.
        """

    def entries(self) -> Iterator[ZooEntry]:
        """List the models."""

    def weights_of(self, name: str) -> list[str]:
        """List the names of a model's published weights."""

    def weights(self, name: str, which: str) -> Mapping[str, Tensor]:
        """Return published weights, a state dict; they are downloaded unless they are cached."""


class Torchvision:
    """Classifiers of torchvision."""

    extra = package = "torchvision"

    def factory(self, name: str, num_labels: int, num_channels: int) -> Callable[[], nn.Module]:
        models = import_package(self, name)
        known = models.list_models(module=models)
        if name not in known:
            raise _unknown(f"torchvision:{name}", known)
        if num_channels != 3:
            raise ConfigError(
                flag="num_channels",
                value=num_channels,
                rule="torchvision's models take images of 3 channels",
                remedy="leave it out, so that grey images get three equal channels; or use timm:",
            )
        # These two have a second output in training, unless they are made without it.
        more = {"init_weights": True, "aux_logits": False} if name in _AUXILIARY else {}
        return partial(models.get_model, name, weights=None, num_classes=num_labels, **more)

    def entries(self) -> Iterator[ZooEntry]:
        models = import_package(self)
        for name in models.list_models(module=models):
            for weights in reversed(list(models.get_model_weights(name))):
                (data, scores), *_ = weights.meta["_metrics"].items()
                yield ZooEntry(
                    name=f"torchvision:{name}",
                    parameters=weights.meta["num_params"],
                    accuracy=scores["acc@1"] / 100,
                    data=data,
                    weights=weights.name,
                )

    def weights_of(self, name: str) -> list[str]:
        models = import_package(self, name)
        return [PRETRAINED, *(one.name for one in models.get_model_weights(name))]

    def weights(self, name: str, which: str) -> Mapping[str, Tensor]:
        kinds = import_package(self, name).get_model_weights(name)
        one = kinds.DEFAULT if which == PRETRAINED else kinds[which]
        state: Mapping[str, Tensor] = one.get_state_dict(progress=False, check_hash=True)
        own = name not in _AUXILIARY
        return {key: value for key, value in state.items() if own or not key.startswith("aux")}


class Timm:
    """Models of timm, PyTorch Image Models."""

    extra = package = "timm"

    def factory(self, name: str, num_labels: int, num_channels: int) -> Callable[[], nn.Module]:
        timm = import_package(self, name)
        bare = name.partition(".")[0]  # NAME.WEIGHTS
        known = timm.list_models()
        if bare not in known:
            raise _unknown(f"timm:{name}", known)
        return partial(timm.create_model, bare, num_classes=num_labels, in_chans=num_channels)

    def entries(self) -> Iterator[ZooEntry]:
        timm = import_package(self)
        for name in timm.list_models():
            yield ZooEntry(name=f"timm:{name}", weights=PRETRAINED * timm.is_model_pretrained(name))

    def weights_of(self, name: str) -> list[str]:
        return [PRETRAINED]

    def weights(self, name: str, which: str) -> Mapping[str, Tensor]:
        model = import_package(self, name).create_model(name, pretrained=True)
        state: Mapping[str, Tensor] = model.state_dict()
        return state


class HuggingFace:
    """Image classifiers of transformers, by the name on the hub or the folder of one."""

    extra = "hf"
    package = "transformers"

    def factory(self, name: str, num_labels: int, num_channels: int) -> Callable[[], nn.Module]:
        transformers = import_package(self, name)
        try:
            config = transformers.AutoConfig.from_pretrained(name)
        except Exception as error:  # of the hub, the network or the file
            raise ConfigError(
                f"Model hf:{name} can't be found ({described(error)}): give a folder with a "
                "config.json, or a name on the hub."
            ) from error
        config.num_labels = num_labels
        if getattr(config, "num_channels", num_channels) != num_channels:
            config.num_channels = num_channels
        return partial(_classifier, transformers, config)

    def entries(self) -> Iterator[ZooEntry]:
        return iter(())  # the hub has them

    def weights_of(self, name: str) -> list[str]:
        return [PRETRAINED]

    def weights(self, name: str, which: str) -> Mapping[str, Tensor]:
        kind = import_package(self, name).AutoModelForImageClassification
        state: Mapping[str, Tensor] = kind.from_pretrained(name).state_dict()
        return state


ZOOS: Mapping[str, OtherZoo] = {
    "torchvision": Torchvision(),
    "timm": Timm(),
    "hf": HuggingFace(),
}

_AUXILIARY = ("googlenet", "inception_v3")
_MODULES = {"torchvision": "torchvision.models"}


def zoo_of(name: str) -> tuple[OtherZoo, str] | None:
    """Return the zoo that a model's name is of, and the name there; None: it is no other zoo's."""
    prefix, colon, own = name.partition(":")
    return (ZOOS[prefix], own) if colon and prefix in ZOOS else None


def pretrained_weights(name: str, which: str) -> Mapping[str, Tensor] | None:
    """Return published weights of a model of another zoo; None: it has none of this name.

    Raises:
        ConfigError: they can't be downloaded.
    """
    found = zoo_of(name)
    if found is None or which not in found[0].weights_of(found[1]):
        return None
    zoo, own = found
    try:
        return zoo.weights(own, which)
    except Exception as error:  # of the hub, the network or the disk
        raise ConfigError(
            f"--weights {which}: the weights of {name} can't be had ({described(error)}): connect "
            "this machine once, or give the path of a file."
        ) from error


def import_package(zoo: OtherZoo, name: str = "") -> Any:
    """Import the package of a zoo.

    Raises:
        ConfigError: it isn't installed, or can't be imported.
    """
    of = f"Model {zoo.extra}:{name}" if name else f"The models of {zoo.package}"
    if find_spec(zoo.package) is None:
        raise ConfigError(
            f"{of}: the package {zoo.package} isn't installed; run pip install "
            f"'paceline[{zoo.extra}]'."
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # of the package's own parts
            return import_module(_MODULES.get(zoo.package, zoo.package))
    except Exception as error:  # torchvision fails so beside another build of torch
        raise ConfigError(
            f"{of}: the package {zoo.package} can't be imported ({described(error)}): install the "
            "release of torchvision that is for this build of torch."
        ) from error


def _classifier(transformers: Any, config: Any) -> nn.Module:
    """Make a classifier that returns the logits alone, as other models do."""
    model: nn.Module = transformers.AutoModelForImageClassification.from_config(config)
    model.register_forward_hook(_logits)
    return model


def _logits(model: nn.Module, images: object, output: Any) -> Tensor:
    logits: Tensor = output.logits
    return logits


def _unknown(name: str, known: list[str]) -> ConfigError:
    prefix, _, own = name.partition(":")
    near = get_close_matches(own, known, n=2)
    guess = f"did you mean {' or '.join(f'{prefix}:{one}' for one in near)}? " if near else ""
    return ConfigError(
        f"There is no model {name}: {guess}paceline zoo '{prefix}:*' lists all {len(known):,}."
    )
