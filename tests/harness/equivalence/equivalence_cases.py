"""The cases of the equivalence grid: what real training code does, for one process and many.

A case is a `Training` by name. Its batches are uneven for any number of ranks, one has fewer
samples than ranks, and the last is short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.harness.equivalence import case_changes as changes
from tests.harness.equivalence import case_models as models
from tests.harness.equivalence import case_steps as steps
from tests.harness.equivalence.large_batch import Training, convnet, made_up_batches, sgd

SIZES = [12, 12, 13, 3, 12, 12, 5]  # of global batches; 3 leave a fourth rank with nothing


def training(make_model: Callable[[], nn.Module], **more: Any) -> Training:
    """Make a model, always with the same values, and its training."""
    torch.manual_seed(11)
    model = make_model().double()
    make_optimizer = more.pop("make_optimizer", sgd)
    return Training(model, make_optimizer, made_up_batches(SIZES), **more)


CASES: dict[str, Callable[[], Training]] = {
    "usual": lambda: training(convnet),
    "tied weights": lambda: training(models.Tied),
    "a layer called twice": lambda: training(models.CalledTwice),
    "attention": lambda: training(models.Attention),
    "unused parameters": lambda: training(models.Unused),
    "a path that depends on the step": lambda: training(models.Alternating),
    "frozen": lambda: training(models.frozen_convnet),
    "three groups": lambda: training(convnet, make_optimizer=steps.three_groups),
    "checkpointed": lambda: training(models.Checkpointed),
    "checkpointed, reentrant": lambda: training(lambda: models.Checkpointed(use_reentrant=True)),
    "accumulated": lambda: training(convnet, make_step=lambda: steps.accumulated),
    "accumulated, part unused at last": lambda: training(
        models.Alternating, make_step=lambda: steps.two_losses
    ),
    "gradients kept between steps": lambda: training(
        convnet, make_step=lambda: steps.zeroed_not_removed
    ),
    "gradients kept in all ways": lambda: training(convnet, make_step=steps.Keeping),
    "clipped by norm": lambda: training(convnet, make_step=lambda: steps.clipped_by_norm),
    "clipped by value": lambda: training(convnet, make_step=lambda: steps.clipped_by_value),
    "set by hand": lambda: training(convnet, make_step=lambda: steps.set_by_hand),
    "loss scaling, one step skipped": lambda: training(
        convnet, make_step=lambda: steps.Scaled(unscale=True)
    ),
    "loss scaling, unscaled by itself": lambda: training(
        convnet, make_step=lambda: steps.Scaled(unscale=False)
    ),
    "loss scaling, fused": lambda: training(
        convnet, make_step=lambda: steps.Scaled(unscale=False), make_optimizer=steps.fused
    ),
    "loss scaling, unscaled and fused": lambda: training(
        convnet, make_step=lambda: steps.Scaled(unscale=True), make_optimizer=steps.fused
    ),
    "closure": lambda: training(convnet, make_step=lambda: steps.with_closure),
    "optimizer's hooks": lambda: training(convnet, make_step=steps.WithHooks),
    "a step left out": lambda: training(convnet, make_step=steps.EveryOther),
    "a loss with parameters": lambda: training(
        models.WithTemperature, make_optimizer=steps.with_outside_parameter
    ),
    "frozen later": lambda: training(convnet, change=changes.freeze),
    "unfrozen later": lambda: training(models.frozen_convnet, change=changes.unfreeze),
    "frozen and unfrozen": lambda: training(convnet, change=changes.toggle),
    "a group added later": lambda: training(convnet, change=changes.add_group),
    "a head replaced": lambda: training(convnet, change=changes.replace_head),
    "a group changed": lambda: training(convnet, change=changes.regroup),
    "unfrozen later, Adam": lambda: training(
        models.frozen_convnet, change=changes.unfreeze, make_optimizer=steps.adam
    ),
    "sync_bn": lambda: training(models.normalised, sync_bn=True),
    "sync_bn of all kinds": lambda: training(models.AllNorms, sync_bn=True),
    "sync_bn, accumulated": lambda: training(
        models.normalised, make_step=lambda: steps.two_losses, sync_bn=True
    ),
    "sync_bn, checkpointed": lambda: training(models.CheckpointedNorms, sync_bn=True),
    "sync_bn, clipped": lambda: training(
        models.normalised, make_step=lambda: steps.clipped_by_norm, sync_bn=True
    ),
    "sync_bn, frozen later": lambda: training(
        models.normalised, change=changes.freeze, sync_bn=True
    ),
}
