"""Pairs of a model and an optimizer, which a world trains; what its `parallelize` calls may give.

parallelize(model, optimizer, world)                one pair
parallelize(model, [optimizer_a, optimizer_b], …)   two: each trains its own parameters
parallelize([encoder, decoder], optimizer, …)       one: a `ModelList` of both
parallelize(critic, optimizer_c, …)                 in another call: a further one
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.config.world import SyncConfig
from paceline.errors import ConfigError
from paceline.replica.model_list import ModelList, roots_of
from paceline.replica.trained_parameters import Scope
from paceline.update.batch_norm import BatchShare
from paceline.update.outer.average import Average
from paceline.wiring.pairs import Pair

_TOGETHER = "pass both in one call: paceline.parallelize([a, b], [optimizer_a, optimizer_b], world)"


def make_pairs(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    earlier: Sequence[Pair],
    config: SyncConfig,
    share: BatchShare,
    average: Average | None = None,
    buffers: str = "broadcast",
) -> list[Pair]:
    """Pair what one call gives.

    Args:
        config: how the call's gradients are exchanged.
        share: this rank's share of each step.
        average: how the call's weights are averaged; None: gradients are exchanged.
        buffers: as of `Pair`.

    Raises:
        ConfigError: several models or optimizers are averaged, or served.
    """
    served = config.sync == "server" or any(pair.config.sync == "server" for pair in earlier)
    if served and len(earlier) + len(optimizers) > 1:
        raise ConfigError(
            'sync="server" was given with several optimizers, but parameter servers update by one: '
            "use another sync, or one optimizer with several parameter groups."
        )
    averaged = average is not None or any(pair.average is not None for pair in earlier)
    if averaged and len(earlier) + len(optimizers) > 1:
        raise ConfigError(
            'sync="average" was given with several optimizers, but it averages the weights of one '
            "model that one optimizer trains: use another sync, or one optimizer with several "
            "parameter groups."
        )
    model = models[0] if len(models) == 1 else ModelList(models)
    count = sum(pair.scope.first for pair in earlier)
    return [
        Pair(
            model=model,
            optimizer=optimizer,
            scope=Scope(first=not number, others=[o for o in optimizers if o is not optimizer]),
            entries=(_entry("model", count), _entry("optimizer", len(earlier) + number)),
            config=config,
            share=share,
            average=average,
            buffers=buffers,
        )
        for number, optimizer in enumerate(optimizers)
    ]


def refuse_shared(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], earlier: Sequence[Pair]
) -> None:
    """Refuse what another call or another optimizer has already.

    Raises:
        ConfigError: a model, optimizer or parameter is given twice.
    """
    if len({*map(id, models)}) < len(models) or len({*map(id, optimizers)}) < len(optimizers):
        raise ConfigError("paceline.parallelize() got an object twice in a list: give it once.")
    roots = [root for pair in earlier for root in roots_of(pair.model)]
    for one in models:
        if any(one is root for root in roots):
            raise ConfigError(
                f"paceline.parallelize() was already called with this model ({type(one).__name__}):"
                " call it once for each model, with a list if several optimizers train it; in a"
                " notebook, run the cell with paceline.join() again, too."
            )
    known = {p for root in roots for p in root.parameters()}
    for one in models:
        for name, p in one.named_parameters():
            if p in known:
                raise ConfigError(
                    f"{name} of {type(one).__name__} is also a parameter of a model of an earlier "
                    f"call of paceline.parallelize(): {_TOGETHER}."
                )
    _refuse_shared_by_optimizers(optimizers, earlier)


def _refuse_shared_by_optimizers(optimizers: Sequence[Optimizer], earlier: Sequence[Pair]) -> None:
    seen = {p for pair in earlier for group in pair.optimizer.param_groups for p in group["params"]}
    for pair in earlier:
        if any(pair.optimizer is optimizer for optimizer in optimizers):
            raise ConfigError(
                f"paceline.parallelize() was already called with this optimizer "
                f"({type(pair.optimizer).__name__}): pass all its models in one call, "
                "paceline.parallelize([a, b], optimizer, world)."
            )
    for optimizer in optimizers:
        own = {p for group in optimizer.param_groups for p in group["params"]}
        if shared := own & seen:
            raise ConfigError(
                f"a parameter of shape {tuple(next(iter(shared)).shape)} is in two optimizers, "
                "which would both update it: give each parameter to one optimizer."
            )
        seen |= own


def refuse_missing(pairs: Sequence[Pair], state: Mapping[str, Any] | None) -> None:
    """Require that all models and optimizers of the checkpoint are restored.

    Raises:
        ConfigError: one was not parallelized.
    """
    restored = {entry for pair in pairs for entry in pair.entries}
    for name in state or ():
        if re.fullmatch(r"(model|optimizer)_\d+", name) and name not in restored:
            raise ConfigError(
                f"the checkpoint has the state of {name}, which isn't trained: call "
                "paceline.parallelize() for the same models and optimizers before the first step."
            )


def _entry(name: str, index: int) -> str:
    return f"{name}_{index + 1}" if index else name
