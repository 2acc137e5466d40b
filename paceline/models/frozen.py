"""Parameters that aren't trained: `--freeze PATTERN`, for fine-tuning.

A BatchNorm layer of which all parameters are frozen stays in evaluation mode: it normalises by its
running statistics, which don't change. So what lies before the trained layers computes the same
function in the whole run, whatever the batches are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.errors import ConfigError, many


def freeze(model: nn.Module, patterns: Sequence[str]) -> str:
    """Freeze the parameters whose names match one of the patterns, in which * is any text.

    Returns:
        what is trained, a sentence; "" without patterns.

    Raises:
        ConfigError: a pattern matches no parameter, or none is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                flag="freeze",
                value=pattern,
                rule="matches no parameter of the model",
                remedy=f"its parameters are {_shown(names, pattern)}",
            )
    for name, parameter in model.named_parameters():
        if _matches(name, patterns):
            parameter.requires_grad_(False)
    left = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if patterns and not left:
        raise ConfigError(
            flag="freeze",
            value=" ".join(patterns),
            rule="freezes all parameters, so that there is nothing to train",
            remedy="leave the last layers out of the patterns",
        )
    if not patterns:
        return ""
    values = sum(p.numel() for p in left.values())
    norms = len(fixed_norms(model, patterns))
    fixed = (
        f" Frozen BatchNorm layers ({norms}) keep their running statistics, and normalise by them."
        if norms
        else ""
    )
    return (
        f"{len(names) - len(left)} of {many(len(names), 'parameter')} are frozen; trained are "
        f"{many(values, 'value')} in {_shown([*left])}.{fixed}"
    )


def fixed_norms(model: nn.Module, patterns: Sequence[str]) -> tuple[nn.Module, ...]:
    """Return the BatchNorm layers of which all parameters are frozen by the patterns."""
    return tuple(_fixed_norms(model, patterns))


def _fixed_norms(model: nn.Module, patterns: Sequence[str]) -> Iterator[nn.Module]:
    for path, module in model.named_modules():
        if isinstance(module, _NormBase):
            own = [f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters()]
            if own and all(_matches(name, patterns) for name in own):
                yield module


def _matches(name: str, patterns: Sequence[str]) -> bool:
    plain = name.replace("_orig_mod.", "")  # of compiled blocks
    return any(fnmatchcase(plain, pattern) for pattern in patterns)


def _shown(names: Sequence[str], pattern: str = "") -> str:
    """Write some names, those first that are like a pattern."""
    near = get_close_matches(pattern, names, n=2) if pattern else []
    first = list(dict.fromkeys([*near, *names]))[:4]
    return ", ".join(first) + (", …" if len(names) > len(first) else "")
