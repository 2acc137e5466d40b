"""`stages`: cuts a model into the stages of a pipeline, and returns this rank's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from paceline.api.argument_names import errors_name_arguments, print_message_for_scripts
from paceline.api.world import World, require_world
from paceline.errors import CommError, ConfigError
from paceline.parallel.cutting import cut_model
from paceline.parallel.pipeline import PipelineOptions
from paceline.parallel.stage import Stage
from paceline.replica.compiled_modules import is_compiled


def stages(
    model: nn.Module,
    world: World,
    *,
    loss: Callable[[Any, Any], Tensor],
    microbatches: int,
    cuts: Sequence[str] | None = None,
    schedule: str = "1f1b",
    blocks: Sequence[str] | None = None,
    example: Tensor | None = None,
    checkpoint_activations: bool = False,
) -> Stage:
    """Cut a model into the stages of `paceline.join(mesh={"stage": …})`. Collective.

    Create the optimizer of what is returned, and pass both to `paceline.parallelize`. In a step,
    `model.train_batch(x, y)` takes the place of forward, loss and backward, and returns the mean
    loss on every rank. `model(x)` evaluates and returns the output on every rank;
    `model.whole_state_dict()` returns the state dict of the whole model, and torch's
    `clip_grad_norm_` clips by the norm over all stages. All three are collective along the stages.

    BatchNorm's statistics are those of each microbatch, as in one process that runs the same
    microbatches one after the other. A parameter that two stages have (tied weights) gets the sum
    of its gradients on both.

    In a mesh that has tensor ranks, too, pass what is returned to `paceline.tensor_parallel`.

    Args:
        model: the whole model, on `world.device`, the same on all ranks: a `torch.nn.Sequential`,
            a ResNet of `paceline.models`, or one whose children run one after the other. A child
            that is a `Sequential` or a `ModuleList` counts as its own children. Without hooks of
            its own, and not compiled.
        world: whose ranks train the model.
        loss: a function of (output, y) that returns the mean over the samples. It is called for
            each microbatch, whose result counts in proportion to its samples; a sum would be
            divided by the number of microbatches.
        microbatches: the number of parts of a replica's batch, at least that of the stages.
        cuts: the names of the blocks at which the stages but the first begin, such as "layer3" or
            "layer3.1"; None: chosen by measured time and parameters' bytes, printed, and used again
            where the run resumes.
        schedule: in which order a stage runs its microbatches: "gpipe"; "1f1b", which keeps the
            activations of fewer; or "zb-h1", which divides backward.
        blocks: the children that run, in the order in which forward runs them; None: all, in the
            order of their definition.
        example: a batch, to measure the blocks' time where there are no `cuts`.
        checkpoint_activations: compute activations again in backward, instead of keeping them.

    Returns:
        this rank's part, a module whose parameters have their names in the whole model.

    Raises:
        ConfigError: an argument breaks a rule, the ranks differ, or the model isn't its blocks one
            after the other; the latter in the first batch.
        CommError: a stage is lost or silent.
    """
    call = "paceline.stages()"
    require_world(world, call)
    with errors_name_arguments(), world._run.context.activities.call(call):
        world._end.require_open(call)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{call} got {type(model).__name__} as its model: pass the module.")
        if is_compiled(model):
            raise ConfigError(
                f"{call} got a compiled model, whose blocks can't be told apart: pass the model as "
                "it is before torch.compile()."
            )
        options = PipelineOptions(
            loss=loss,
            microbatches=microbatches,
            cuts=cuts,
            schedule=schedule,
            blocks=blocks,
            example=example,
            checkpoint_activations=checkpoint_activations,
        )
        return cut_model(
            model,
            world._run,
            _BoundReplica(world),
            options,
            report=print_message_for_scripts,
            folder=world._session.folder,
        )


@dataclass(frozen=True)
class _BoundReplica:
    """Replica of a stage's gradients: the one that the world binds later."""

    world: World

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients inside."""
        return self.world._loop.require_replica("model.train_batch()").no_sync()

    def lose(self, error: CommError) -> None:
        """Let the script continue after a loss between two steps, if all of it is undone."""
        loop = self.world._loop
        if loop.in_step:
            raise error
        loop.lose_between_steps(error)
        if not loop.rollback.goes_back:
            raise error
