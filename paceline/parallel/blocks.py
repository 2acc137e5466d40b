"""Blocks of a model, which run one after the other, and the part of them that is a stage.

    model         conv1  bn1  layer1                 layer2                 fc
    blocks        conv1  bn1  layer1.0  layer1.1     layer2.0  layer2.1     fc
    cuts          ("layer1.1", "fc")
    stages        conv1  bn1  layer1.0 │ layer1.1    layer2.0  layer2.1   │ fc

The blocks of a model are its children in their order, each `nn.Sequential` or `nn.ModuleList` taken
apart into its own children. A part has modules of the model under their names, so that the parts'
state dicts join. What a model does between two children belongs to one of them: its `Glue`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

from torch import Tensor, nn

from paceline.errors import ConfigError, Message
from paceline.models.resnet import ResNet, activated, averaged

Value = Tensor | tuple[Tensor, ...]
"""What a stage gets, and returns."""
Glue = Mapping[str, tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]]
"""By a child's name: what runs before it and after it."""


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a value."""
    return [value] if isinstance(value, Tensor) else [*value]


def can_travel(value: object) -> bool:
    """Return whether a value is what a stage may return to the next one, as `Value` says.

    A named tuple isn't: it would arrive without its names.
    """
    tensors = value if type(value) is tuple else (value,)
    return all(isinstance(tensor, Tensor) for tensor in tensors)


def glue_of(model: nn.Module) -> Glue:
    """Return what a model of a known class does between its children."""
    if isinstance(model, ResNet):
        return {"bn1": (None, partial(activated, pools=model.pools)), "fc": (averaged, None)}
    return {}


def run_blocks(blocks: Mapping[str, nn.Module | None], glue: Glue, value: Any) -> Any:
    """Run children of a model one after the other, with what is between them."""
    for name, block in blocks.items():
        before, after = glue.get(name, (None, None))
        value = value if before is None else before(value)
        value = value if block is None else block(value)
        value = value if after is None else after(value)
    return value


def block_paths(model: nn.Module, names: Sequence[str] | None = None) -> list[str]:
    """Return the paths of a model's blocks, in their order.

    Args:
        model: the model.
        names: its children that run, in their order; None: all, in the order of their definition.

    Raises:
        ConfigError: there is no such child.
    """
    children = model._modules
    if missing := [name for name in names or () if name not in children]:
        raise ConfigError(
            f"blocks names {missing[0]!r}, which is no child of the model: name children, "
            f"which are {', '.join(children)}, in the order in which forward runs them."
        )
    chosen = {name: children[name] for name in names or children}
    return [path for name, child in chosen.items() for path in _paths(child, name)]


def _paths(module: nn.Module | None, path: str) -> Iterator[str]:
    in_order = module is not None and type(module).forward is nn.Sequential.forward
    if module is not None and (in_order or isinstance(module, nn.ModuleList)) and module._modules:
        for name, child in module._modules.items():
            yield from _paths(child, f"{path}.{name}")
    else:
        yield path


def cut_paths(paths: Sequence[str], cuts: Sequence[str]) -> list[list[str]]:
    """Return the paths of each stage's blocks.

    Args:
        paths: of all blocks.
        cuts: where each stage but the first begins: a block, or what has several.

    Raises:
        ConfigError: there is no such block, or the cuts aren't in the blocks' order.
    """
    starts = [0]
    for cut in cuts:
        found = [n for n, path in enumerate(paths) if is_inside(path, cut)]
        if not found or not found[0]:
            raise ConfigError(
                Message(
                    "{--cuts} names {!r}, where no stage can begin: each stage but the first "
                    "begins at a block of the model, which are {}.{}",
                    cut,
                    _listed(paths[1:]),
                    _guess(cut, paths),
                )
            )
        if found[0] <= starts[-1]:
            raise ConfigError(
                Message(
                    "{--cuts} has {!r} behind {!r}, which isn't before it in the model: give the "
                    "cuts in the order of the blocks, each once.",
                    cut,
                    cuts[len(starts) - 2],
                )
            )
        starts.append(found[0])
    return [list(paths[a:b]) for a, b in zip(starts, [*starts[1:], len(paths)], strict=True)]


def is_inside(path: str, outer: str) -> bool:
    """Return whether a path is another one, or is inside of it."""
    return path == outer or path.startswith(f"{outer}.")


def take_part(model: nn.Module, paths: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """Return the children of a model, or of a module in it, of which a stage has blocks.

    A child of which it has only some is a `nn.Sequential` of these, under their own names; so is a
    `nn.ModuleList`, which a model's forward runs itself.
    """
    children = {}
    order = dict.fromkeys(path.removeprefix(prefix).partition(".")[0] for path in paths)
    for name in order:
        child = model._modules[name]
        path = f"{prefix}{name}"
        inside = [one for one in paths if is_inside(one, path)]
        if child is not None and (
            isinstance(child, nn.ModuleList) or inside != [*_paths(child, path)]
        ):
            some = nn.Sequential()
            for inner, module in take_part(child, inside, f"{path}.").items():
                some.add_module(inner, module)
            child = some.train(child.training)
        children[name] = child
    return children


def _guess(cut: str, paths: Sequence[str]) -> str:
    """Return which blocks, or children that have several, have similar names, as a question."""
    known = [*paths[1:], *(path.partition(".")[0] for path in paths[1:])]
    near = get_close_matches(cut, dict.fromkeys(known), n=2)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _listed(paths: Sequence[str]) -> str:
    shown = [*paths] if len(paths) <= 12 else [*paths[:6], "…", *paths[-5:]]
    return ", ".join(shown) or "none"
