"""Plans of tensor parallelism: which modules torch's styles divide, by their paths in the model.

A path may have wildcards, one for each of its parts: "layers.*.mlp.up". A Hugging Face model has a
plan of its own, whose styles are names: https://huggingface.co/docs/transformers/perf_infer_gpu_multi
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from paceline.errors import ConfigError

Plan = str | Mapping[str, str | ParallelStyle] | None

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
}
_DIVIDING = (ColwiseParallel, RowwiseParallel)
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def read_plan(model: nn.Module, plan: Plan) -> dict[str, ParallelStyle]:
    """Return a plan's styles by path.

    Args:
        plan: styles, or their names, by path; "transformer"; or None: the model's own.

    Raises:
        ConfigError: the plan isn't known, names no module, or one that no style divides.
    """
    if plan is None:
        plan = _own_plan(model)
    elif isinstance(plan, str):
        plan = _named_plan(model, plan)
    styles = {path: _style(path, style) for path, style in plan.items()}
    for path, style in styles.items():
        matched = [*matched_modules(model, path)]
        if not matched:
            names = ", ".join(repr(name) for name, _ in model.named_children())
            raise ConfigError(
                f"the plan has {path!r}, which is no module of the model: its children are {names}."
            )
        if isinstance(style, _DIVIDING):
            for name, module in matched:
                _require_divisible(model, name, module, type(style).__name__)
    return styles


def _named_plan(model: nn.Module, name: str) -> dict[str, str]:
    if name != "transformer":
        raise ConfigError(
            f"plan is {name!r}; it must be 'transformer', or styles by the modules' paths."
        )
    plan = {}
    for path, module in model.named_modules():
        if isinstance(module, _LAYERS):
            prefix = f"{path}." if path else ""
            plan[f"{prefix}linear1"] = "colwise"
            plan[f"{prefix}linear2"] = "rowwise"
    if not plan:
        raise ConfigError(
            "plan is 'transformer', which divides torch's nn.TransformerEncoderLayer and "
            f"nn.TransformerDecoderLayer, but {type(model).__name__} has none: pass styles by the "
            "modules' paths."
        )
    return plan


def _own_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan of a Hugging Face model: its base model's, and its head's."""
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not base:
        raise ConfigError(
            f"no plan was given, and {type(model).__name__} has none of its own "
            "(config.base_model_tp_plan): pass plan='transformer', or styles by the modules' paths."
        )
    prefix = getattr(model, "base_model_prefix", "")
    inside = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    head = getattr(type(model), "_tp_plan", None) or {}
    return {**{f"{inside}{path}": style for path, style in base.items()}, **head}


def _style(path: str, style: object) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if isinstance(style, str) and style in _STYLES:
        return _STYLES[style]()
    raise ConfigError(
        f"the plan has {style!r} for {path!r}; it must be one of {', '.join(_STYLES)}, or a style "
        "of torch.distributed.tensor.parallel."
    )


def matched_modules(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a plan's path is, with their own paths."""
    parts = path.split(".")
    for name, module in model.named_modules():
        names = name.split(".")
        if (
            bool(name) is bool(path)
            and len(names) == len(parts)
            and all(map(fnmatchcase, names, parts))
        ):
            yield name, module


def _require_divisible(model: nn.Module, name: str, module: nn.Module, style: str) -> None:
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        raise ConfigError(
            f"{name} is a part of nn.MultiheadAttention, which reads its weights itself: leave it "
            "out of the plan, or write the attention with a Linear for each projection."
        )
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ConfigError(
            f"{name} is a {type(module).__name__}, but torch's {style} divides Linear and "
            "Embedding only: replace it by one of them, or leave it out of the plan."
        )
