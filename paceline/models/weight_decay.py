"""Which parameters weight decay pulls at, as Caffe2's trainer did.

The weights of convolutions and linear layers (whatever has two dimensions or more) and
BatchNorm's scale; not biases. Leaving BatchNorm's scale out is today's habit, by flag.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def decay_groups(
    model: nn.Module, weight_decay: float, *, norm_scale: bool
) -> list[dict[str, object]]:
    """Return two parameter groups for a torch optimizer: with `weight_decay`, and with none.

    Args:
        model: its parameters, each once, in the model's order.
        weight_decay: of the first group.
        norm_scale: whether BatchNorm's scale is in the first group.
    """
    scales = {m.weight for m in model.modules() if isinstance(m, _NormBase) and m.affine}
    with_decay: list[nn.Parameter] = []
    without: list[nn.Parameter] = []
    for p in model.parameters():
        decays = norm_scale if p in scales else p.ndim >= 2
        (with_decay if decays else without).append(p)
    groups = [
        {"params": with_decay, "weight_decay": weight_decay},
        {"params": without, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
