"""Module of one stage: some blocks of a model, under their names in it.

loss = model.train_batch(x, y)      all microbatches, forward and backward
output = model(x)                   an evaluation
model.whole_state_dict()            the parts of all stages
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.checkpoint import checkpoint

from paceline.comm.communicator import gather_states
from paceline.errors import ConfigError
from paceline.parallel.blocks import Glue, run_blocks
from paceline.parallel.divided_modules import divided_dims
from paceline.parallel.interpreter import is_differentiable, same
from paceline.parallel.meta_twin import MetaTwin
from paceline.parallel.pipeline import Pipeline


class Stage(nn.Module):
    """Stage of a model: this rank's blocks, which run together with those of the other stages.

    `paceline.stages` makes it. Its parameters have their names in the whole model.

    Args:
        children: of the model, which the stage has.
        runs: the names of those that run, in their order.
        glue: what is between children.
        pipeline: connects the stages.
        keys: of the whole model's state dict.
    """

    def __init__(
        self,
        children: Mapping[str, nn.Module | None],
        runs: Sequence[str],
        glue: Glue,
        pipeline: Pipeline,
        keys: Sequence[str],
    ) -> None:
        super().__init__()
        self._modules.update(children)  # a child may have the name of anything
        self._runs = runs
        self._glue = glue
        self._pipeline = pipeline
        self._keys = keys
        self._in_batch = False

    @property
    def twin(self) -> MetaTwin:
        """The whole model, without values."""
        return self._pipeline.twin

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this stage, and of the twin, by whose mode shapes are computed."""
        self.twin.whole.train(mode)
        return super().train(mode)

    def train_batch(self, x: Tensor, y: Tensor) -> Tensor:
        """Run forward and backward of a batch through all stages; collective along them.

        Call it inside `world.step()`, in place of forward, loss and backward. Gradients are those
        of the mean loss.

        Args:
            x: the batch, the same on all stages of a replica, as `paceline.loader` yields it.
            y: its labels, likewise.

        Returns:
            the mean loss over this replica's batch, on every stage, as float64.

        Raises:
            ConfigError: the stages got different batches, the loss isn't one number, or the model
                isn't its blocks one after the other.
            CommError: a stage is lost or silent.
        """
        self._in_batch = True
        try:
            return self._pipeline.train(self, self.parameters, x, y)
        finally:
            self._in_batch = False

    def forward(self, x: Any) -> Any:
        """Return the output of the whole model, on every stage; collective along them.

        No gradients are computed. The batch is cut into microbatches, as in training.
        """
        if not self._in_batch:
            output = self._pipeline.evaluate(self._run, x)
            training = self.training and torch.is_grad_enabled()
            return tree_map(_without_backward, output) if training else output
        self._pipeline.tied.divert()
        if not self._pipeline.options.checkpoint_activations:
            return self._run(x)
        contexts = partial(_checkpoint_contexts, self)
        return checkpoint(self._run_copy, x, use_reentrant=False, context_fn=contexts)

    def whole_state_dict(self, *, on_all: bool = True) -> dict[str, Any]:
        """Return the state dict of the whole model, on the CPU; collective along the stages.

        Where layers are divided, it is collective along the tensor ranks, too.

        Args:
            on_all: otherwise the first stage alone gets it, and the others an empty one.
        """
        own = {n: tree_map_only(Tensor, Tensor.cpu, x) for n, x in self.state_dict().items()}
        dims = divided_dims(self)
        if self._pipeline.run.context.along("tensor").size > 1:
            shards = self._gathered("tensor", {name: own[name] for name in dims})
            own |= {name: torch.cat([each[name] for each in shards], dims[name]) for name in dims}
        found: dict[str, Any] = {}
        for state in self._gathered("stage", own, on_all=on_all):
            found.update(state)
        return {key: found[key] for key in self._keys if found}

    def _gathered(
        self, axis: str, state: Mapping[str, Any], *, on_all: bool = True
    ) -> list[dict[str, Any]]:
        """Return what each rank along an axis has; collective."""
        communicator = self._pipeline.run.context.group(axis, "steps")
        return gather_states(communicator, state, "model.whole_state_dict()", on_all=on_all)

    def _run_copy(self, value: Any) -> Any:
        """Run the blocks on a copy: the first one may write to it, and all run again."""
        return self._run(tree_map(Tensor.clone, value))

    def _run(self, value: Any) -> Any:
        return run_blocks({name: self._modules[name] for name in self._runs}, self._glue, value)


def _checkpoint_contexts(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return _unchanged_buffers(module), _KeptStatistics(module)


@contextmanager
def _unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Run blocks that may change no buffers but those of norms: they run once more."""
    earlier = _buffer_versions(module).items()
    yield
    if changed := dict(_buffer_versions(module).items() - earlier):
        raise ConfigError(
            f"the model's forward changes its buffer {min(changed)}, but checkpointed "
            "activations are computed twice: train without checkpointing activations, or "
            "replace what changes buffers in forward, such as spectral_norm."
        )


def _buffer_versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return which tensor each buffer is, but for those of norms, and how often it was written."""
    return {
        f"{path}.{name}" if path else name: (id(buffer), buffer._version)
        for path, module in module.named_modules()
        if not isinstance(module, _NormBase)
        for name, buffer in module.named_buffers(recurse=False)
    }


class _KeptStatistics:
    """Context in which norms run once more without a second update of their statistics.

    It can be entered several times, one after the other.
    """

    def __init__(self, module: nn.Module) -> None:
        self._norms = [m for m in module.modules() if isinstance(m, _NormBase)]
        self._earlier: list[tuple[float | None, Tensor | None]] = []

    def __enter__(self) -> None:
        self._earlier = [(norm.momentum, norm.num_batches_tracked) for norm in self._norms]
        for norm in self._norms:
            norm.momentum = 0.0
            norm.num_batches_tracked = None

    def __exit__(self, *_: object) -> None:
        for norm, (momentum, batches) in zip(self._norms, self._earlier, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked = batches


def _without_backward(output: Tensor) -> Tensor:
    """Return an evaluation's output, whose backward raises an error that names the remedy."""
    if is_differentiable(output):
        output = same(output.requires_grad_())
        output.register_hook(_refuse_backward)
    return output


def _refuse_backward(_: Tensor) -> None:
    raise ConfigError(
        "backward() of what model(x) returned, which evaluates: no stage computed gradients. "
        "Call model.train_batch(x, y) in place of forward, loss and backward."
    )
