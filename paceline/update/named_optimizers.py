"""Optimizers by name: torch's own, and those of the package pytorch_optimizer.

    --optimizer adamw --optimizer_options "betas=(0.9, 0.95) eps=1e-6"

Options are arguments of the class, with literal values. Learning rate and weight decay are those
that the caller gives, as for any optimizer.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from paceline.errors import ConfigError

TORCHS: Mapping[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(optim).items()
    if isinstance(kind, type)
    and issubclass(kind, Optimizer)
    and kind not in (Optimizer, optim.SparseAdam)  # which takes the gradients of embeddings alone
}
"""Torch's optimizers, by their names in lower case."""

FLAGS = {"lr": "base_learning_rate", "weight_decay": "weight_decay"}
"""The flags that give options of all optimizers."""

_OPTION = re.compile(r"(?:^|[\s,]+)([A-Za-z_]\w*)\s*=")


def optimizer_class(name: str) -> type[Optimizer]:
    """Find an optimizer's class.

    Raises:
        ConfigError: there is none of this name, or its package isn't installed.
    """
    name = name.lower()
    if name in TORCHS:
        return TORCHS[name]
    installed = find_spec("pytorch_optimizer") is not None
    more: list[str] = []
    if installed:
        from pytorch_optimizer import get_supported_optimizers, load_optimizer

        more = get_supported_optimizers()
        if name in more:
            kind: type[Optimizer] = load_optimizer(name)
            return kind
    near = get_close_matches(name, [*TORCHS, *more], n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    others = (
        f"the package pytorch_optimizer has {len(more)}, such as lamb, lars and lion"
        if installed
        else "pip install 'paceline[optimizers]' brings many more, LAMB and LARS among them"
    )
    raise ConfigError(
        f"--optimizer {name}: there is no such optimizer; {guess}torch has {', '.join(TORCHS)}; "
        f"{others}."
    )


def make_named_optimizer(
    name: str, groups: Iterable[dict[str, Any]], options: str = "", **given: Any
) -> Optimizer:
    """Make an optimizer.

    Args:
        name: as in `optimizer_class`.
        groups: parameter groups.
        options: names and literal values, as above; they replace `given` ones.
        given: arguments of the class.

    Raises:
        ConfigError: there is no such optimizer; the options can't be read, or aren't the class's;
            or the class refuses a value or the parameters.
    """
    kind = optimizer_class(name)
    arguments = {**given, **_read(name, options, kind)}
    try:
        return kind(list(groups), **arguments)
    except Exception as error:  # of a foreign class, which may raise anything
        raise ConfigError(
            f"--optimizer {name} can't be made of these parameters and options ({error}): change "
            "--optimizer_options, or choose another --optimizer."
        ) from error


def probe(name: str, options: str, **given: Any) -> Optimizer:
    """Make an optimizer of one small matrix, and let it make steps: what it needs shows itself.

    Raises:
        ConfigError: as `make_named_optimizer`; or it needs more than a gradient for a step, or its
            steps are random, by which the ranks' weights would differ.
    """
    matrices = []
    for seed in (0, 1):
        matrix = nn.Parameter(torch.ones(4, 4))
        optimizer = make_named_optimizer(name, [{"params": [matrix]}], options, **given)
        if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
            raise ConfigError(
                f"--optimizer {name} evaluates with other weights than it trains, which takes "
                "calls of its own: choose another one, with --ema for averaged weights."
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            _step(name, optimizer, matrix)
        matrices.append(matrix)
    _require_plain_state(name, optimizer)
    if not torch.equal(*matrices):
        raise ConfigError(
            f"--optimizer {name} draws random numbers in its steps, so that the ranks' weights "
            "would differ: choose another one."
        )
    return optimizer


def _step(name: str, optimizer: Optimizer, matrix: nn.Parameter) -> None:
    """Make three steps."""
    try:
        for number in range(3):
            matrix.grad = torch.linspace(-1, 1, 16).reshape(4, 4) + number
            optimizer.step()
    except Exception as error:  # of a foreign class, which may raise anything
        raise ConfigError(
            f"--optimizer {name} can't make a step from gradients alone "
            f"({str(error).rstrip('.') or type(error).__name__}): choose another one, which needs "
            "neither the loss nor second derivatives."
        ) from error


def _require_plain_state(name: str, optimizer: Optimizer) -> None:
    """Require a state that a checkpoint can have, which is read without running code."""
    file = io.BytesIO()
    try:
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"--optimizer {name} has a state of more than tensors and plain values, which "
            "checkpoints don't hold: choose another one."
        ) from error


def usual_rate(name: str) -> float | None:
    """Return the learning rate that an optimizer's class has by default; None: it has none."""
    options = _parameters(optimizer_class(name))
    rate = options["lr"].default if "lr" in options else None
    return float(rate) if isinstance(rate, int | float | Tensor) else None


def _read(name: str, text: str, kind: type[Optimizer]) -> dict[str, Any]:
    parts = _OPTION.split(text.strip())
    if parts[0].strip():
        raise ConfigError(
            f"--optimizer_options {text}: must be names and values, such as "
            '"betas=(0.9, 0.95) eps=1e-6".'
        )
    known = [key for key in _parameters(kind) if key not in FLAGS]
    values = {}
    for key, value in zip(parts[1::2], parts[2::2], strict=True):
        if key in FLAGS:
            raise ConfigError(f"--optimizer_options {key}: give it as --{FLAGS[key]}.")
        if key not in known:
            near = get_close_matches(key, known, n=1)
            guess = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"--optimizer_options {key}: {name} has no such option; {guess}it has "
                f"{', '.join(known)}."
            )
        try:
            values[key] = ast.literal_eval(value.strip(" ,"))
        except (ValueError, SyntaxError):
            raise ConfigError(
                f"--optimizer_options {key}={value.strip()}: the value must be a number, True, "
                "False, None, a text in quotes, or a tuple of these."
            ) from None
    return values


def _parameters(kind: type[Optimizer]) -> dict[str, inspect.Parameter]:
    """Return a class's arguments after the parameters; by name, as the class has them."""
    _, *parameters = inspect.signature(kind).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p for p in parameters if p.kind in kinds}
