"""A model that workers train locally and average; it has the interface of `Replica`.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.algorithms.average import Averaging
from paceline.algorithms.average_parts import divide_state, restore_divided
from paceline.algorithms.method import Rounds
from paceline.algorithms.synchronizer import StepInfo, Weights
from paceline.comm.communicator import Communicator, broadcast_all
from paceline.errors import CommError, ConfigError
from paceline.generation.run import Run
from paceline.reduce.buckets import Bucket, partition
from paceline.reduce.rank_state import gather_parts
from paceline.replica.live_hooks import LiveHook, patch
from paceline.replica.model_list import roots_of
from paceline.replica.state.copier import LOCAL, RANK, SHARED, StateCopier
from paceline.replica.trained_parameters import Fingerprint, TrainedParameters
from paceline.state.state_copy import copy_state

AVERAGE = "average"  # key of the state in a checkpoint
WORKERS = "workers"
MERGED = "merged"  # its parts


class AveragedReplica:
    """Replica of a model whose weights are averaged over the workers every few steps.

    Args:
        model: the model, with the same structure on all ranks; rank 0's values replace those of the
            other ranks.
        optimizer: trains it on each rank.
        communicator: returns what connects all ranks.
        open_average: makes what merges a model's buckets; collective.
        bucket_bytes: approximate size of a bucket in bytes; less where the model is so small that
            there would be fewer buckets than fragments.
        fragments: number of fragments that `open_average` divides the buckets into.

    Attributes:
        stepped: always True: ranks may skip updates (loss scaling) by themselves.
        on_loss: not called: no use of the model waits for peers.
        loaded: nothing: a load that differs between ranks shows in the merged weights.
        bindings: how often an exchange was opened: once in each generation.

    Raises:
        ConfigError: a lazy module has no shapes yet.
        CommError: a peer was lost, or didn't answer in time.
    """

    exchanging = added_to_kept = unused = unwritten = False
    stateful = stepped = True
    loaded: Mapping[str, int] = {}
    on_loss: Callable[[CommError], None] | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        run: Run,
        open_average: Callable[[Sequence[Bucket]], Averaging],
        *,
        bucket_bytes: int,
        fragments: int = 1,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._run = run
        self._trained = trained = TrainedParameters.of(model, optimizer)
        broadcast_all(self._ranks, trained.tensors, "the broadcast of rank 0's weights")
        total = sum(p.nbytes for p in trained.groups if p.requires_grad)
        size = min(bucket_bytes, max(1, total // fragments))
        buckets = partition(trained.names, trained.groups, size)
        self._open = partial(open_average, buckets)
        self._average = self._open()
        self._bound = True
        self.bindings = 1
        self._start: Mapping[str, Mapping[Any, Any]] = {}  # the snapshot that was restored
        self._weight = 1.0
        self._stepping = False
        self._updated = False  # the optimizer has stepped in this step
        self._loading: dict[nn.Module, dict[Tensor, int]] = {}  # versions before a load
        self._undo = ExitStack()
        self._watch()

    @property
    def names(self) -> Mapping[nn.Parameter, str]:
        """The names of the parameters."""
        return self._trained.names

    @property
    def all_names(self) -> list[Mapping[nn.Parameter, str]]:
        """`names`, as of the only pair of a model and an optimizer."""
        return [self.names]

    @property
    def ended(self) -> bool:
        """Whether no step is under way, or its update was made."""
        return not self._stepping or self._updated

    @property
    def rounds(self) -> Rounds:
        """The rounds of the merges."""
        return self._average

    def begin_batch(self) -> None:
        """Do nothing: buffers are this worker's own."""

    def discard_batches(self) -> None:
        """Discard the gradients of batches that no step will train."""
        self._optimizer.zero_grad()
        self._model.zero_grad()

    def begin(self, number: int, weight: float, samples: int = 1) -> None:
        """Begin a step, which `end` ends, or `abandon` where it fails.

        Args:
            number: its number.
            weight: by which the step counts in the merge, of all workers' 1; by default local
                samples / global samples. With 0 the update changes nothing.
            samples: global samples.

        Raises:
            ConfigError: other parameters are trained than at the start.
            CommError: a peer was lost, or didn't answer in time.
        """
        if Fingerprint(self._optimizer) != self._trained.fingerprint:
            raise ConfigError(
                "the optimizer trains other parameters than at the start, which sync="
                '"average" does not support: freeze, unfreeze and add parameters before '
                "paceline.parallelize()."
            )
        self._average.begin(StepInfo(number, weight, samples))
        self._weight = weight
        self._stepping = True
        self._updated = False

    def end(self) -> None:
        """End the step, and begin the merges that are due."""
        self.abandon()
        self._average.end(update=True)

    def abandon(self) -> None:
        """Leave a step: the model may have the merged weights, and a schedule may step."""
        self._stepping = False
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check it

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate; nothing is exchanged anyhow."""
        yield

    def reduce(self) -> None:
        """Do nothing: gradients are local."""

    def settle(self) -> None:
        """Do nothing: a worker's own weights are final after each update."""

    def follow(self, scale: Callable[[], float]) -> None:
        """Do nothing: what travels isn't scaled by the loss's scale."""

    def synchronize_replicas(self) -> None:
        """Let the model have the weights of the last merge, which are equal everywhere."""
        self._average.settle(Weights.EQUAL)

    def merge(self) -> None:
        """Merge at once what was trained since the last merges, and show the result; collective.

        Raises:
            CommError: a peer was lost, or didn't answer in time.
        """
        self._average.settle(Weights.MERGED)

    def drain(self) -> None:
        """End the exchange, once the peers have all that they need of this rank, or at a limit."""
        self._average.close(drain=True)

    def copy_in_step(self, copier: StateCopier) -> None:
        """Copy the merged weights before the next step at once, for the replica check."""
        copier.copy_parameters(self._trained.names, self._average.anchors())

    def copy_now(self, copier: StateCopier, *, own: bool = True) -> bool:
        """Copy the merged weights, and the optimizer's state, before the next step at once.

        Args:
            copier: copies it.
            own: with what is this worker's alone. Merges under way are awaited; they are applied
                in their step all the same.

        Returns:
            True: the parameters are those of the start.

        Raises:
            CommError: a peer was lost, or didn't answer in time.
        """
        divided = divide_state(self._average) if own else None
        self._average.settle(Weights.EQUAL)
        copier.begin(self._trained.names, ())
        if divided is None:
            copier.end(None, in_step=False)
        else:
            copier.end_with(dict(zip((RANK, LOCAL, SHARED), divided, strict=True)))
        return True

    def state(self) -> Mapping[str, Any] | None:
        """Return all workers' own weights, buffers and optimizer states on rank 0; collective.

        Merges under way are awaited; they are applied in their step all the same.

        Raises:
            CommError: a peer was lost, or didn't answer in time.
        """
        own = {
            **self._average.local(),
            "buffers": dict(self._model.named_buffers()),
            "optimizer": self._optimizer.state_dict(),
        }
        what = "the gather of the workers' own weights"
        gathered = gather_parts(self._ranks, copy_state(own), what)
        if not gathered:
            return None
        return {AVERAGE: {WORKERS: gathered, MERGED: copy_state(self._average.shared())}}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> bool:
        """Restore what `state` returned.

        Returns:
            False where the workers' own weights, or what was under way, had to be dropped.
        """
        communicator = self._ranks
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
        return self._average.restore(saved[MERGED], own)

    def leave_generation(self) -> None:
        """Remove all hooks and close the exchange, without a wait, until `enter_generation`."""
        self._undo.close()
        if self._bound:  # entering may have failed
            self._bound = False
            self._average.close()

    def begin_from(self, snapshot: Mapping[str, Mapping[Any, Any]]) -> None:
        """Note a snapshot of `take_snapshot`, restored in the model, for `enter_generation`.

        Args:
            snapshot: its parts, whose memory stays as it is until then.
        """
        self._start = snapshot

    def enter_generation(self, parts: Sequence[Mapping[str, Any]] | None) -> bool:
        """Open the exchange of the next generation, after `begin_from`; collective.

        Each worker continues with its own weights, optimizer and unmerged samples. What lost
        workers trained since the last merge is taken over by the ranks that have their parts, and
        merged with the rest. A new worker begins with the weights of the last merge.

        Args:
            parts: this worker's, empty for a new one; then those of workers that are gone. None:
                the model has the merged weights of a checkpoint, and `restore` gets the rest.

        Returns:
            False where residuals had to be dropped, because no lossy wire is used any more.

        Raises:
            RankStateError: a lost worker had unmerged changes, and its part is missing.
            CommError: a peer was lost, or didn't answer in time.
        """
        self._stepping = self._updated = False
        self._average = self._open()
        self._bound = True
        self.bindings += 1
        self._watch()
        if parts is None:
            self._start = {}
            return True
        local = self._start[LOCAL]
        shared = self._start[SHARED]
        communicator = self._ranks
        self._start = {}
        return restore_divided(self._average, parts, local, shared, communicator)

    def close(self) -> None:
        """Remove the hooks from model and optimizer and close the exchange, without a wait."""
        self.leave_generation()

    @property
    def _ranks(self) -> Communicator:
        return self._run.context.group("data", "steps")

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
        self._updated = True

    def _train(
        self, plain: Callable[[bool], nn.Module], model: nn.Module, mode: bool = True
    ) -> nn.Module:
        """Replace `model.train()`, which `eval()` calls too."""
        if not self._stepping:
            if mode:
                self._average.settle(Weights.OWN)
            else:
                self._average.settle(Weights.EQUAL)
        return plain(mode)

    def _before_saving(self, *_: object) -> None:
        if not self._stepping:
            self._average.settle(Weights.EQUAL)

    def _before_loading(self, module: nn.Module, *_: object) -> None:
        self._average.settle(Weights.OWN)
        self._loading[module] = {tensor: tensor._version for tensor in _own_tensors(module)}

    def _after_loading(self, module: nn.Module, *_: object) -> None:
        """Let training begin anew with what was loaded into a module."""
        before = self._loading.pop(module, {})
        present = _own_tensors(module)
        if any(p in self._trained.names and p not in present for p in before):
            raise ConfigError(
                f"load_state_dict(assign=True) has replaced parameters of {type(module).__name__}, "
                "but the optimizer has the earlier ones: leave out assign=True, or load before the "
                "optimizer is made."
            )
        self._average.rebase({t for t in present if before.get(t, t._version) != t._version})


def _own_tensors(module: nn.Module) -> set[Tensor]:
    """Return a module's own parameters and buffers."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return set(own)
