"""Small slices: layers that need two samples of a rank, and batches that have fewer for it.

    65 samples, batch_size=16, 2 ranks      last batch: 1         refused in the first step
    67 samples                                          3 = 2 + 1 divided as 3 + 0

BatchNorm after a linear layer has one value a channel of each sample, and no variance of one value.
Whether a model has such a layer is seen in the first step. From then on no rank gets one sample: it
gets none, and computes two of the others' with weight 0, which count nothing. All ranks agree on
that, because it decides which rank trains which samples; the run's position has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.comm.communicator import gather_counts
from paceline.data.order import Order
from paceline.errors import ConfigError, PacelineError
from paceline.generation.run import Run
from paceline.replica.compiled_modules import visible_modules
from paceline.snapshots.position import Position
from paceline.update.batch_norm import SyncBatchNorm

# A class with another forward may accept one value, so it isn't checked.
_FORWARDS = (_BatchNorm.forward, SyncBatchNorm.forward)


class SmallSlices:
    """Rule for the smallest slice of a batch that a rank may get, if it gets any.

    Args:
        run: the run, whose ranks agree on it in the first step of each generation.
        position: the run's position.
        remedies: what a user can do, for errors: about a last batch of one sample; and where other
            ranks have further ones.
    """

    def __init__(self, run: Run, position: Position, remedies: tuple[str, str]) -> None:
        self._run = run
        self._position = position
        self._remedies = remedies
        self._watched: int | None = None  # the last generation whose first step is watched

    @property
    def min_slice(self) -> int:
        """The smallest number of samples of a rank's slice that isn't empty: 1 or 2."""
        return self._position.min_slice

    @contextmanager
    def in_step(
        self, models: Sequence[nn.Module], order: Order | None, samples: int
    ) -> Iterator[None]:
        """Watch the layers in a first step's block, where a small slice may follow; collective.

        Args:
            order: of the batches; None: the script has its own.
            samples: the number that this rank computes in the step.

        Raises:
            ConfigError: a layer got one value a channel, or will at the epoch's end.
        """
        context = self._run.context
        group = context.along("data")
        tail = 0 if order is None else order.samples % order.batch_size
        layers = []
        watches = self._watched != group.generation.number and not context.mesh.divided
        if watches and 0 < tail < 2 * group.size:  # stages would find different layers
            layers = _layers_of(models)
        found: dict[str, _BatchNorm] = {}

        def look(name: str, layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            if layer.training and x.numel() <= samples * x.shape[1]:
                found[name] = layer

        with ExitStack() as hooks:
            for name, layer in layers:
                hooks.callback(layer.register_forward_pre_hook(partial(look, name)).remove)
            try:
                yield
            except ValueError as error:
                ours = isinstance(error, PacelineError)
                if ours or "more than 1 value per channel" not in str(error):
                    raise
                raise ConfigError(
                    f"{error}: a BatchNorm got one value per channel, which has no variance, "
                    "because this rank has one sample of the batch: "
                    f"{', or '.join(self._remedies)}."
                ) from error
        if not layers:
            return
        self._watched = group.generation.number
        if found and tail == 1:
            raise ConfigError(
                "each epoch's last batch has one sample, of which the BatchNorm "
                f"{next(iter(found))} gets one value per channel, which has no variance: "
                f"{self._remedies[0]}."
            )
        alone = [layer for layer in found.values() if not isinstance(layer, SyncBatchNorm)]
        what = "the agreement on the smallest slice of a batch"
        found_by_ranks = gather_counts(self._run.context.group("data", "steps"), len(alone), what)
        if any(found_by_ranks):
            self._position.min_slice = 2


def _layers_of(models: Sequence[nn.Module]) -> list[tuple[str, _BatchNorm]]:
    """Return the layers that normalise by samples, with their names."""
    found = []
    for model in models:
        names = {module: name for name, module in model.named_modules()}
        for module in visible_modules(model):
            if isinstance(module, _BatchNorm) and type(module).forward in _FORWARDS:
                found.append((names[module], module))
    return found
