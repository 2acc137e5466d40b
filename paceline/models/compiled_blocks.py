"""Which parts of a model are compiled on their own: its repeated blocks.

A block is a module with children inside a sequence (`nn.Sequential`, `nn.ModuleList`,
`nn.ModuleDict`): a ResNet's residual blocks, a transformer's layers. Of blocks within blocks it is
the outermost that is repeated in its sequence, or the innermost. Blocks of one shape share what is
compiled, and each is one reader of its parameters. What lies between them (a stem, a classifier)
are single operations that compiling wouldn't make faster. A model without blocks is compiled by its
direct children that have children, or as a whole.
"""

from __future__ import annotations

from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict)  # they aren't called themselves
_SEQUENCES = (nn.Sequential, *_LISTS)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model to compile, none inside another."""
    found = _in_sequences(model)
    composed = [child for child in model.children() if _is_composed(child)]
    return list(dict.fromkeys(found or composed or [model]))


def _in_sequences(module: nn.Module) -> list[nn.Module]:
    found = []
    kinds = [type(child) for child in module.children()]
    for child in module.children():
        inner = _in_sequences(child)
        repeated = kinds.count(type(child)) > 1 and not isinstance(child, _SEQUENCES)
        if isinstance(module, _SEQUENCES) and _is_composed(child) and (repeated or not inner):
            found.append(child)
        else:
            found += inner
    return found


def _is_composed(module: nn.Module) -> bool:
    return not isinstance(module, _LISTS) and any(True for _ in module.children())
