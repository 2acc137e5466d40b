"""`tensor_parallel`: divides a model's layers among the ranks along the mesh's axis "tensor"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from paceline.api.argument_names import errors_name_arguments
from paceline.api.module_checks import require_supported_modules
from paceline.api.world import World, require_world
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

_Model = TypeVar("_Model", bound=nn.Module)


def tensor_parallel(
    model: _Model, world: World, plan: str | Mapping[str, str | ParallelStyle] | None = None
) -> _Model:
    """Divide a model's layers along `paceline.join(mesh={"tensor": …})`, in place. Collective.

    Torch's `parallelize_module` divides it, with the styles of `torch.distributed.tensor.parallel`.
    Create the optimizer afterwards, and pass both to `paceline.parallelize`, which exchanges this
    rank's shards along the replicas. The loop doesn't change. `model.parameters()` and
    `model.state_dict()` have this rank's shards, as plain tensors; a module reads its parameters as
    DTensors. Torch's `clip_grad_norm_` clips by the whole model's norm; collective.

    Args:
        model: the whole model, on `world.device`; or this rank's stage of it, as
            `paceline.stages` returns it. The first tensor rank's values count.
        world: whose ranks train the model.
        plan: styles by the modules' paths in the whole model, such as {"layers.*.up": "colwise",
            "layers.*.down": "rowwise"}, as names or torch's objects; "transformer", which divides
            the feed-forward parts of torch's transformer layers; or None: the plan that a Hugging
            Face model has, `config.base_model_tp_plan`.

    Returns:
        the model.

    Raises:
        ConfigError: the plan doesn't fit the model, or the ranks don't divide a parameter.
        CommError: a tensor rank is lost or silent.
    """
    call = "paceline.tensor_parallel()"
    require_world(world, call)
    with errors_name_arguments(), world._run.context.activities.call(call):
        world._end.require_open(call)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{call} got {type(model).__name__} as its model: pass the module.")
        require_supported_modules(model, world.device)
        from paceline.parallel.dividing import divide  # DTensors take seconds to import

        divide(model, world._run, plan)
    return model
