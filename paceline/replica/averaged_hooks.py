"""Hooks that tie a model to averaging: what a script saves and evaluates are the merged weights.

    replica.begin(number, weight)       merges that are due are applied
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()                    torch's own, on this worker's gradients
    optimizer.zero_grad()
    replica.end()                       merges that are due are begun

Nothing is exchanged in a step, so gradients, clipping and loss scaling are local, and any optimizer
of torch's works as it does without Paceline. Between two steps, `eval()` and `state_dict()` let the
model have the weights of the last merge, which all workers have alike; `train()` and the next step
return this worker's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.algorithms.average import Averaging
from paceline.algorithms.average_parts import divide_state, restore_divided
from paceline.algorithms.synchronizer import StepInfo, Weights
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from paceline.reduce.rank_state import gather_parts
from paceline.replica.checksums import Parts
from paceline.replica.copier import Copier
from paceline.replica.live_hooks import LiveHook, patch
from paceline.replica.model_list import roots_of
from paceline.replica.state_parts import LOCAL, RANK, SHARED
from paceline.replica.trained_parameters import Fingerprint, TrainedParameters
from paceline.state.state_copy import copy_state

AVERAGE = "average"  # key of the state in a checkpoint
WORKERS = "workers"
MERGED = "merged"  # its parts


class AveragedHooks:
    """Hooks on a model whose weights are averaged over the workers every few steps.

    Args:
        optimizer: trains it on each rank.
        average: merges their weights.

    Attributes:
        synchronizer, rounds: `average`.
        reads: None: no read waits.
        stepping: whether a step is under way.
        updated: whether the optimizer has stepped in it.
    """

    reads = None

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, trained: TrainedParameters, average: Averaging
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self.trained = trained
        self.synchronizer = average
        self.rounds = average
        self.stepping = False
        self.updated = False
        self._weight = 1.0
        self._loading: dict[nn.Module, dict[Tensor, int]] = {}  # versions before a load
        self._undo = ExitStack()
        self._watch()

    def begin(self, step: StepInfo) -> None:
        """Start a step; with weight 0 its update changes nothing.

        Raises:
            ConfigError: other parameters are trained than at the start.
            CommError: a peer was lost, or didn't answer in time.
        """
        if Fingerprint(self._optimizer) != self.trained.fingerprint:
            raise ConfigError(
                "the optimizer trains other parameters than at the start, which sync="
                '"average" does not support: freeze, unfreeze and add parameters before '
                "paceline.parallelize()."
            )
        self.rounds.begin(step)
        self._weight = step.weight
        self.stepping = True
        self.updated = False

    def copy_now(self, copier: Copier, *, own: bool) -> None:
        """Copy the merged weights, and the optimizer's state; as `Replica.copy_now`."""
        divided = divide_state(self.rounds) if own else None
        self.rounds.settle(Weights.EQUAL)
        copier.begin(self.trained.names, ())
        if divided is None:
            copier.end(None, in_step=False)
        else:
            copier.end_with(dict(zip((RANK, LOCAL, SHARED), divided, strict=True)))

    def gather(self, communicator: Communicator) -> Mapping[str, Any] | None:
        """Return all workers' own weights, buffers and optimizer states on rank 0; collective.

        Merges under way are awaited; they are applied in their step all the same.
        """
        own = {
            **self.rounds.local(),
            "buffers": dict(self._model.named_buffers()),
            "optimizer": self._optimizer.state_dict(),
        }
        what = "the gather of the workers' own weights"
        gathered = gather_parts(communicator, copy_state(own), what)
        if not gathered:
            return None
        return {AVERAGE: {WORKERS: gathered, MERGED: copy_state(self.rounds.shared())}}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any], communicator: Communicator) -> bool:
        """Restore what `gather` returned.

        Returns:
            False where the workers' own weights, or what was under way, had to be dropped.
        """
        saved = state[AVERAGE]
        own = None
        if len(saved[WORKERS]) == communicator.world_size:
            own = saved[WORKERS][communicator.rank]
            self._optimizer.load_state_dict(own["optimizer"])
            for name, buffer in self._model.named_buffers():
                if name in own["buffers"]:
                    value = own["buffers"][name]
                    if buffer.shape != value.shape:  # a buffer that its first use makes larger
                        buffer.resize_(value.shape)
                    buffer.copy_(value)
        return self.rounds.restore(saved[MERGED], own)

    def enter(
        self,
        parts: Sequence[Mapping[str, Any]],
        snapshot: Parts | None,
        communicator: Communicator,
    ) -> bool:
        """Restore a snapshot of `copy_now`, which the model has; as `Replica.enter_generation`.

        Each worker continues with its own weights, optimizer and unmerged samples. What lost
        workers trained since the last merge is taken over by the ranks that have their parts, and
        merged with the rest. A new worker begins with the weights of the last merge.
        """
        assert snapshot is not None
        local = snapshot[LOCAL]
        shared = snapshot[SHARED]
        return restore_divided(self.rounds, parts, local, shared, communicator)

    def close(self, *, drain: bool = False) -> None:
        """Remove the hooks and close the synchronizer."""
        self._undo.close()
        self.rounds.close(drain=drain)

    def _watch(self) -> None:
        """Show the merged weights where a script wants them, and make no update without samples."""
        before = self._optimizer.register_step_pre_hook(LiveHook(self._before_update))
        after = self._optimizer.register_step_post_hook(LiveHook(self._after_update))
        self._undo.callback(before.remove)
        self._undo.callback(after.remove)
        for one in roots_of(self._model):
            self._undo.callback(patch(one, "train", partial(self._train, one.train)))
        for module in self._model.modules():
            saved = module.register_state_dict_pre_hook(LiveHook(self._before_saving))
            loading = module.register_load_state_dict_pre_hook(LiveHook(self._before_loading))
            loaded = module.register_load_state_dict_post_hook(LiveHook(self._after_loading))
            self._undo.callback(saved.remove)
            self._undo.callback(loading.remove)
            self._undo.callback(loaded.remove)

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        if not self._weight:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None

    def _after_update(self, *_: object) -> None:
        self.updated = True

    def _train(
        self, plain: Callable[[bool], nn.Module], model: nn.Module, mode: bool = True
    ) -> nn.Module:
        """Replace `model.train()`, which `eval()` calls too."""
        if not self.stepping:
            self.rounds.settle(Weights.OWN if mode else Weights.EQUAL)
        return plain(mode)

    def _before_saving(self, *_: object) -> None:
        if not self.stepping:
            self.rounds.settle(Weights.EQUAL)

    def _before_loading(self, module: nn.Module, *_: object) -> None:
        self.rounds.settle(Weights.OWN)
        self._loading[module] = {tensor: tensor._version for tensor in _own_tensors(module)}

    def _after_loading(self, module: nn.Module, *_: object) -> None:
        """Let training begin anew with what was loaded into a module."""
        before = self._loading.pop(module, {})
        present = _own_tensors(module)
        if any(p in self.trained.names and p not in present for p in before):
            raise ConfigError(
                f"load_state_dict(assign=True) has replaced parameters of {type(module).__name__}, "
                "but the optimizer has the earlier ones: leave out assign=True, or load before the "
                "optimizer is made."
            )
        self.rounds.rebase({t for t in present if before.get(t, t._version) != t._version})


def _own_tensors(module: nn.Module) -> set[Tensor]:
    """Return a module's own parameters and buffers."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return set(own)
