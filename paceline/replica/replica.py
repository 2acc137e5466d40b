"""A model and its optimizer bound to a synchronizer, whose methods are called in each step.

    replica.begin(number, weight)       begin
    loss = criterion(model(x), y)       before_read: a pre-hook on every reader of parameters
    loss.backward()                     gradient_ready: a hook after each parameter's gradient
    optimizer.step()                    end
    optimizer.zero_grad()
    replica.end()

`optimizer.step()` freezes the hyperparameters and returns; the update itself happens in the next
forward, layer by layer, as results arrive, or in `settle`. `eval()`, `state_dict()` and
`load_state_dict()`, the model's and the optimizer's, settle first.

An optimizer that may not update bucket by bucket is stepped by its own `step()` at that moment,
once the gradients of all ranks are summed.

The optimizer's own step hooks see what they see in plain torch: before a pre-hook gradients are
reduced, before a post-hook parameters are settled. So does a script that uses `optimizer.state`.

When other parameters are trained than in the step before, or the model has got new parameters or
buffers, the replica settles and binds anew; new ones get rank 0's values. All ranks must get the
same ones. It does the same where another method continues (`MethodBuilder.plan`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from paceline.algorithms.average import Averaging
from paceline.algorithms.method import Method, MethodBuilder
from paceline.algorithms.synchronizer import StepInfo, Weights
from paceline.errors import CommError, ConfigError
from paceline.generation.run import Run
from paceline.reduce.buckets import Bucket
from paceline.reduce.rank_state import Masters
from paceline.replica.averaged_hooks import AveragedHooks
from paceline.replica.backward_calls import watch_backward_calls
from paceline.replica.binder import Binding, ReplicaBinder
from paceline.replica.buffer_broadcast import BufferBroadcast
from paceline.replica.checksums import Checksums, Parts
from paceline.replica.copier import Copier
from paceline.replica.earlier_buffers import EarlierBuffers
from paceline.replica.hooks import ReplicaHooks
from paceline.replica.live_hooks import before_scaler_calls, patch, watch_scaler
from paceline.replica.model_list import roots_of
from paceline.replica.model_structure import ModelStructure
from paceline.replica.read_tracing import ReadMap
from paceline.replica.trained_parameters import (
    WHOLE,
    Fingerprint,
    Scope,
    TrainedParameters,
)
from paceline.update.batch_norm import BatchShare
from paceline.update.parameter_watch import Gap, ParameterWatch
from paceline.update.state_watch import unwatch_state, watch_state
from paceline.update.updater import is_bucketwise


class LossScaler(Protocol):
    """Protocol of what scales the loss, such as torch's `GradScaler`."""

    def get_scale(self) -> float:
        """Return the scale of the next step's loss."""


class PeerLossHandler(Protocol):
    """Protocol of what continues a run after a peer was lost."""

    def lose_between_steps(self, error: CommError) -> None:
        """Let the code between two steps continue without the exchange.

        Raises:
            CommError: the error, where the run can't continue.
        """


class Replica:
    """Model replica of this rank, synchronised with the other ranks.

    Args:
        model: the model, with the same structure on all ranks; rank 0's values replace those of the
            other ranks.
        optimizer: optimizer of the model's parameters, of other parameters, or of both.
        run: the run, whose ranks hold the same replica.
        builder: makes its methods.
        share: this rank's share of the global batch, which each step sets; the SyncBatchNorm layers
            use the same object.
        scope: what the replica has of its model, where several optimizers train it.
        purpose: of the group that makes the ranks' states equal, at the start and when the set of
            trained parameters changes.
        buffers: broadcasts the buffers that the model computes; None: they are this rank's own.

    Attributes:
        stepped: whether the last step ended by `optimizer.step()`; of averaged weights always
            True: ranks may skip updates (loss scaling) by themselves.
        rounds: merges the ranks' weights, which differ between two steps; None: they are equal.
        loaded: checksums of what the script has loaded before the last step, by name.
        peer_loss_handler: gets the error where a use of the model between two steps finds that a
            peer was lost, and the use continues without it. None: the error is raised.

    Raises:
        ConfigError: a lazy module has no shapes yet, or the optimizer is not supported.
        CommError: a peer was lost, or didn't answer in time.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        run: Run,
        builder: MethodBuilder,
        *,
        share: BatchShare | None = None,
        scope: Scope = WHOLE,
        purpose: str = "steps",
        buffers: BufferBroadcast | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        # Of a module without buffers, nothing is broadcast.
        self._buffers = buffers or BufferBroadcast(nn.Module(), run)
        self._builder = builder
        self._share = BatchShare() if share is None else share
        self._timeline = run.timeline
        self._scaler: LossScaler | None = None
        self._number: int | None = None  # the current step
        self.peer_loss_handler: PeerLossHandler | None = None
        self._thread = threading.get_ident()  # of its steps
        self._has_graphs = False  # a backward has made gradients that can be differentiated
        self._settled = False  # since the last step's end
        self._when_settled: list[tuple[int, int]] = []  # the parameters' versions and addresses
        self._copier: Copier | None = None  # of the next step
        self._earlier = EarlierBuffers(model)
        self._watch = ParameterWatch(self)
        self.loaded: Checksums = {}
        self.rounds: Averaging | None = None
        self._averaged: AveragedHooks | None = None  # the hooks, where gradients are local
        self._binder = ReplicaBinder(self, model, optimizer, run, purpose, builder, scope)
        self._hooks: Binding | None = self._binder.bind(set())  # None between generations
        self.stepped = self.rounds is not None
        self._follows_scalers = False
        self._buffers.begin_generation()
        self._structure = ModelStructure(model)
        self._binder.settle_before_states()
        self._plain_step = optimizer.step
        self._plain_zero = optimizer.zero_grad
        self._hooked_end = Optimizer.profile_hook_step(self._freeze_update)
        self._patches: list[Callable[[], None]] = []
        if self.rounds is None:
            self._watch_uses(model, optimizer)

    def _watch_uses(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Watch what a script does with exchanged gradients, and with pending updates."""
        self._patches += [
            patch(optimizer, "step", self._step_optimizer),
            patch(optimizer, "zero_grad", self._zero_optimizer),
            *(patch(one, "train", partial(self._train, one.train)) for one in roots_of(model)),
            *(
                patch(one, "zero_grad", partial(self._zero_model, one.zero_grad))
                for one in roots_of(model)
            ),
            watch_scaler(optimizer, self._refuse_early_unscaling),
            lambda: unwatch_state(optimizer, self.settle_for_use),
            watch_backward_calls(self),
        ]

    @property
    def names(self) -> Mapping[nn.Parameter, str]:
        """The names of the parameters that the model and the optimizer had when they were bound."""
        return self._bound.trained.names

    @property
    def all_names(self) -> list[Mapping[nn.Parameter, str]]:
        """`names`, for each pair of a model and an optimizer: for this one."""
        return [self.names]

    @property
    def bindings(self) -> int:
        """How often parameters were bound to a synchronizer."""
        return self._binder.bindings

    @property
    def masters(self) -> Masters | None:
        """The masters of narrow parameters; None: there are none. The same on all ranks."""
        state = None if self._averaged is not None else self._binding.state
        return None if state is None else state.masters

    @property
    def stateful(self) -> bool:
        """Whether ranks divide state now, or did in the last binding; the same on all."""
        return self._binder.stateful

    @property
    def ended(self) -> bool:
        """Whether no step is under way: `optimizer.step()` has ended it, or none has begun."""
        if self._averaged is not None:
            return not self._averaged.stepping or self._averaged.updated
        return self._number is None

    @property
    def exchanging(self) -> bool:
        """Whether a step is under way, whose exchange uses the communicator of all ranks."""
        return self._number is not None

    @property
    def frozen(self) -> bool:
        """Whether no parameter that is bound is trained now."""
        return not any(p.requires_grad for p in self._binding.gradients.parameters)

    @property
    def reads(self) -> ReadMap | None:
        """Which modules read which parameters; None until the first step has traced it."""
        return self._binding.reads

    @property
    def reduced(self) -> bool:
        """Whether the last step's sums were awaited before its update, by `reduce`, say."""
        return self._binding.gradients.reduced

    @property
    def equal_between_steps(self) -> bool:
        """Whether all ranks read the same parameters in a step, without `synchronize`."""
        return self._averaged is None and self._binding.access.reads is None

    @property
    def stale_reads(self) -> Counter[int]:
        """How often a bucket was read that was so many versions behind; empty where none is."""
        stale = None if self._averaged is not None else self._binding.access.reads
        return Counter() if stale is None else stale

    def trained(self) -> TrainedParameters:
        """List the present trained parameters; raises as `TrainedParameters.of`."""
        return self._binder.trained()

    def on_close(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the replica closes."""
        self._patches.append(undo)

    @property
    def added_to_kept(self) -> bool:
        """Whether a backward has added to a gradient of an earlier step, which no file has."""
        return isinstance(self._hooks, ReplicaHooks) and self._hooks.added_to_kept

    def begin_batch(self) -> None:
        """Let snapshots have the buffers from before the next forward, until a step trains it."""
        self._earlier.due = True

    def discard_batches(self) -> None:
        """Discard the gradients and buffers' values of batches that no step will train."""
        self._earlier.restore()
        self._optimizer.zero_grad()
        self._model.zero_grad()

    def begin(self, number: int, weight: float, samples: int = 1) -> None:
        """Begin a step, which `end` ends, or `abandon` where it fails.

        Args:
            weight: of this rank's gradient in the sum; by default local samples / global samples.
                Where weights are averaged, by which the step counts in the merge.
            samples: global samples.

        Raises:
            ConfigError: the model or its optimizer has changed against a rule; names the remedy.
            CommError: a peer was lost, or didn't answer in time.
        """
        if self._averaged is not None:
            self._averaged.begin(StepInfo(number, weight, samples))
            return
        self._buffers.install()
        self.loaded = self._binder.loads.take()
        self._bind_anew_if_changed()
        self._number = number
        self._thread = threading.get_ident()
        self._share.begin(weight)
        scale = 1.0 if self._scaler is None or not self.stateful else self._scaler.get_scale()
        self._binding.begin(StepInfo(number, weight, samples, scale))
        if not weight:
            self._follow_scalers()
        if self._copier is not None:
            settled = self._settled or not self._binder.bucketwise
            self._binding.begin_snapshot(self._copier, settled=settled)
            self._copier = None

    def end(self) -> None:
        """End the step; without an update, where `optimizer.step()` wasn't called.

        Raises:
            ConfigError: the step broke a rule of the exchange; names the remedy.
            CommError: a peer was lost, or didn't answer in time.
        """
        if self._averaged is not None:
            self._averaged.stepping = False
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # a schedule may step
            self._averaged.synchronizer.end(update=True)
            return
        self.stepped = self._number is None
        if not self.stepped:
            self._end_without_update()
        self._share.end()
        self._has_graphs = False
        self._forget_earlier_buffers()
        self._binding.finish_tracing()
        self._buffers.send()

    def abandon(self) -> None:
        """Leave a step that failed: no other follows in its generation."""
        if self._averaged is not None:
            self._averaged.stepping = False  # the model may have the merged weights
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # a schedule may step

    def before_backward(
        self, outputs: Sequence[object], inputs: Sequence[object], *, create_graph: bool
    ) -> None:
        """Look at a backward pass before it runs, in the thread of the replica's steps.

        Args:
            outputs: what is differentiated.
            inputs: with respect to which gradients are returned; empty where they accumulate.
            create_graph: whether the gradients can be differentiated.

        Raises:
            ConfigError: gradients of trained parameters are going to be differentiated, and this
                rank isn't the only one.
        """
        if self._hooks is None or threading.get_ident() != self._thread:
            return
        self._binding.before_backward(alone=self._binder.alone)
        if not create_graph or self._binder.alone or self._number is None:
            return
        self._has_graphs |= not inputs
        trained = self._binding.gradients.parameters
        for given in inputs:
            node = getattr(given, "node", None)  # of a GradientEdge
            tensor = getattr(node, "variable", given)
            if isinstance(tensor, nn.Parameter) and tensor in trained:
                raise ConfigError(
                    "torch.autograd.grad(…, create_graph=True) was called for the gradient of "
                    f"{self._binding.trained.names[tensor]} in step {self._number}: it is the one "
                    "of this rank's samples, so what a loss makes of it would differ from that of "
                    "the global batch. Differentiate with respect to inputs; or, where each "
                    "sample or task has its own gradient, with respect to a copy, "
                    "parameter.clone()."
                )

    def _end_without_update(self) -> None:
        """End the step, whose block has ended without `optimizer.step()`."""
        with self._watch.paused():
            self._binding.end_snapshot()
            self._binding.synchronizer.end(update=False)
            self._done()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: gradients of backward passes inside stay here; one outside sends the sum."""
        if self._averaged is not None:
            yield
            return
        self._binding.note_kept()
        self._binding.gradients.expect_none()
        exchanging = self._binding.exchanging
        self._binding.exchanging = False
        try:
            yield
        finally:
            self._binding.exchanging = exchanging

    def reduce(self) -> None:
        """Wait, and make every `.grad` the mean over the global batch; then it may be changed.

        Where weights are averaged, gradients are local, and nothing is done.

        Raises:
            ConfigError: no step runs.
            CommError: a peer was lost, or didn't answer in time.
        """
        if self._averaged is not None:
            return
        if self._number is None:
            raise ConfigError(
                "reduce() was called outside a step: call it within a step, after backward and "
                "before optimizer.step()."
            )
        if not self._binding.gradients.reduced:
            self._watch.end()
            self._binding.require_kept_gradients()
            if self._has_graphs:
                self._refuse_graphs()
            self._binding.gradients.before_reduce()
            self._binding.access.reduce()

    def _refuse_graphs(self) -> None:
        """Refuse gradients that can be differentiated, which their mean can't be."""
        for p in self._binding.gradients.parameters:
            if p.grad is not None and p.grad.requires_grad:
                raise ConfigError(
                    f"the gradient of {self._binding.trained.names[p]} is used after a backward "
                    "with create_graph=True: the mean over the global batch takes its place, which "
                    "can't be differentiated. Leave out create_graph=True, or differentiate what "
                    "torch.autograd.grad(…, inputs, create_graph=True) returns."
                )

    def settle(self, weights: Weights = Weights.OWN) -> None:
        """Make this rank's parameters and running statistics final; as `Synchronizer.settle`."""
        if weights is not Weights.OWN:
            self._bound.synchronizer.settle(weights)
            return
        if self._hooks is None or self._averaged is not None:  # a worker's own are final
            return
        if self._watch.gap is Gap.UPDATES:
            self._watch.end()
        self._buffers.install()
        self._binding.settle()
        if not self._settled and self._number is None:
            self._when_settled = _versions(self._binding.gradients.parameters)
        self._settled = True

    def synchronize(self) -> None:
        """Settle; where ranks read other parameters in a step, make them equal. Collective then.

        Averaged weights stay as they are.
        """
        self.settle()
        if self._averaged is None and not self.equal_between_steps:
            self._binding.synchronizer.settle(Weights.MERGED)
            self._when_settled = _versions(self._binding.gradients.parameters)

    def settle_for_use(self) -> None:
        """Settle before a script uses the model or the optimizer's state."""
        try:
            self.settle()
        except CommError as error:
            if self.peer_loss_handler is None or self._number is not None:
                raise
            self.peer_loss_handler.lose_between_steps(error)

    def expose_gradients(self, parameter: nn.Parameter) -> None:
        """Settle before a script uses a parameter's gradient: gradients become the global means."""
        self._binding.expose_gradients(parameter)

    @property
    def unused(self) -> bool:
        """Whether no code has used a parameter since the last step, and a use would be detected."""
        return self._watch.gap is Gap.UPDATES

    @property
    def unwritten(self) -> bool:
        """Whether the parameters are as the last step left them, once the replica is settled."""
        return self._settled and self._when_settled == _versions(self._binding.gradients.parameters)

    def copy_in_step(self, copier: Copier) -> None:
        """Let the next step copy the state before it, each part when it passes the part's moment.

        Nothing is settled, and the ranks' parameters are equal between steps. The snapshot is held
        when `optimizer.step()` is called in that step, or the step ends without it; if the step
        fails before that, there is none. Of averaged weights, the parameters of the last merge are
        copied at once, and nothing is held.
        """
        if self._averaged is not None:
            copier.copy_parameters(self.names, self._averaged.rounds.anchors())
            return
        self._copier = copier

    def copy_now(self, copier: Copier, *, own: bool = True) -> bool:
        """Settle, and copy the state before the next step at once; the snapshot is held.

        Args:
            copier: copies it.
            own: with what a rank of an averaging run has alone, for which merges are awaited.

        Returns:
            whether all its parameters are bound; others get rank 0's values in the next step.
        """
        if self._averaged is not None:
            self._averaged.copy_now(copier, own=own)
            return True
        self.settle()
        trained = self._binder.trained()  # may be others than bound
        names = {**self._binding.trained.names, **trained.names}
        self._binding.begin_snapshot(copier, settled=True, names=names)
        copier.end(self._binding.state, in_step=False)
        self._binding.copier = None
        return trained.names == self._binding.trained.names

    def drain(self) -> None:
        """End the exchange, once the peers have all that they need of this rank, or at a limit."""
        with suppress(CommError):  # a peer that has gone needs nothing
            self._buffers.install()
        self._bound.synchronizer.close(drain=True)

    def state(self) -> Mapping[str, Any] | None:
        """Settle, and return the ranks' own state, besides model and optimizer; collective.

        Returns:
            the state by parameter, on rank 0, so that another world size can restore it; None on
            other ranks, and where no rank has any.
        """
        return self._binder.state()

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Restore on all ranks what `state` returned; return False if some of it was dropped."""
        return self._binder.restore(state)

    def use_loss_scale(self, scaler: LossScaler) -> None:
        """Rescale a lossy wire's residuals by the scale of the loss."""
        self._scaler = scaler

    def leave_generation(self) -> None:
        """Remove the hooks and close the synchronizer, without a wait; a step ends unfinished.

        Until `enter_generation` the model is a plain one, whose state may be restored.
        """
        self._binder.leave()
        self._buffers.discard()
        self._hooks = None
        self._averaged = None
        self._number = None
        self._copier = None
        self._forget_earlier_buffers()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # a schedule may step
        self._share.end()

    def enter_generation(
        self, parts: Sequence[Mapping[str, Any]] | None, snapshot: Parts | None = None
    ) -> bool:
        """Enter the next generation, and resume from a snapshot that all its ranks have restored.

        Where ranks have other parts of the divided state than before, it is divided anew.

        Args:
            parts: this rank's own part of the state that is divided among ranks, which
                `restore_state` returned, and further ones that it has of members that aren't in the
                generation. The part of a member that wasn't in the last generation is empty.
                None: model and optimizer have the whole state of a checkpoint, and `restore` gets
                the rest.
            snapshot: all parts of the snapshot, which averaged weights need besides.

        Returns:
            False where some of it was dropped: residuals, where no lossy wire is used any more.

        Raises:
            CommError: a rank was lost, or didn't come in time.
            RankStateError: the parts of all ranks together aren't the whole state.
        """
        self._hooks, whole = self._binder.enter(parts, snapshot)
        self._buffers.begin_generation()
        if self._averaged is None:
            self._when_settled = _versions(self._binding.gradients.parameters)
            self._settled = True
        return whole

    def close(self) -> None:
        """Remove the hooks from model and optimizer and close the synchronizer, without a wait."""
        self._binder.unbind()
        self._buffers.discard()
        while self._patches:
            self._patches.pop()()

    def _bind_anew_if_changed(self) -> None:
        old = self._binding
        plan = self._builder.plan(begins=False) if self._builder.changes else None
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of them by the script
            same = Fingerprint(self._optimizer) == old.trained.fingerprint
        if self._structure.take_change():
            self._buffers.find()
            if added := self._structure.take_added():
                self._binder.require_same_additions(added)
                same = False
        if same and plan is None:
            return
        if not self.equal_between_steps:
            self.synchronize()
        self._hooks = self._binder.bind_anew(plan, same=same)
        self._binding.exchanging = old.exchanging
        self._binding.kept = old.kept

    def make_hooks(
        self,
        trained: TrainedParameters,
        buckets: Sequence[Bucket],
        method: Method,
        reads: ReadMap | None,
    ) -> Binding:
        """Make the hooks of a binding, which `ReplicaBinder` asks for."""
        self.rounds = method.rounds
        if method.rounds is not None:
            self._averaged = AveragedHooks(self._model, self._optimizer, trained, method.rounds)
            return self._averaged
        self._watch.bind(p for bucket in buckets for p in bucket.parameters)
        hooks = self._make_exchange_hooks(
            self._model, trained, buckets, method, self._watch, reads, self._earlier
        )
        hooks.buffers = self._buffers
        return hooks

    def _make_exchange_hooks(self, *arguments: Any) -> ReplicaHooks:
        return ReplicaHooks(*arguments)

    @property
    def _bound(self) -> Binding:
        assert self._hooks is not None, "the replica is in no generation"
        return self._hooks

    @property
    def _binding(self) -> ReplicaHooks:
        """The hooks, where gradients are exchanged."""
        assert isinstance(self._hooks, ReplicaHooks), "the replica is in no generation"
        return self._hooks

    def _step_optimizer(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Replace `optimizer.step()`: inside a step, end it."""
        if self._number is None:
            return self._plain_step(*args, **kwargs)
        self._watch.end()
        if not self._binder.bucketwise:
            return self._make_own_step(optimizer, *args, **kwargs)
        if not args and not kwargs and _has_hooks(optimizer, "pre"):  # no closure to run first
            self.reduce()
        return self._hooked_end(optimizer, *args, **kwargs)

    def _freeze_update(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._watch.end()
        assert self._number is not None
        self._binding.gradients.guard.check(self._number)
        self._refuse_unexchanged()
        self._binding.end_snapshot()
        self._binding.synchronizer.end(update=True)
        self._done()
        # A script, or load_state_dict(), may have replaced it.
        watch_state(optimizer, self.settle_for_use)
        if self._binding.immediate:
            self._settled = True
        elif _has_hooks(optimizer, "post") or not is_bucketwise(optimizer):  # its step was wrapped
            self.settle()
        else:
            self._watch.begin(Gap.UPDATES)
        return loss

    def _make_own_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """End the step by the optimizer's own `step()`, once the gradients are summed."""

        def reduced_closure() -> Any:
            assert closure is not None
            loss = closure()
            self.reduce()
            return loss

        if closure is None:
            self.reduce()
        else:
            args = (reduced_closure, *args)
        self._refuse_unexchanged()
        with self._timeline.span("update", bucket=0):
            result = self._plain_step(*args, **kwargs)
        if not self._binding.gradients.reduced:
            raise ConfigError(
                f"{type(optimizer).__name__}.step() was given a closure and did not call it, so it "
                "updated from this rank's gradients alone: call step() without a closure."
            )
        self._binding.end_snapshot()
        self._binding.synchronizer.end(update=True)
        self._done()
        return result

    def _forget_earlier_buffers(self) -> None:
        self._earlier.due = False
        self._earlier.values = None

    def _done(self) -> None:
        self._number = None
        self._settled = False
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check it
        self._binding.end()

    def _follow_scalers(self) -> None:
        """Let scalers find the gradients on this rank, which has no samples."""
        if not self._follows_scalers:
            self._follows_scalers = True
            undo = before_scaler_calls(self._optimizer, self._before_scaler_call)
            self._patches.append(undo)

    def _before_scaler_call(self, scaler: GradScaler) -> None:
        """Reduce before a scaler's call in a step without samples; make the scale that it lacks."""
        if self._number is None or self._share.weight:
            return
        if scaler._scale is None:  # its first step
            device = self._binding.trained.tensors[0].device
            scaler._lazy_init_scale_growth_tracker(device)
        self.reduce()

    def _refuse_early_unscaling(self) -> None:
        """Reduce before a GradScaler's step; refuse gradients that were unscaled before that."""
        if self._number is None:
            return
        self.reduce()
        if not self._binding.gradients.reduced_as_sent():
            raise ConfigError(
                "a GradScaler unscaled gradients that had already been sent in step "
                f"{self._number}: call reduce() after backward, before unscale_() and step()."
            )
        state = self._binding.state
        if self._scaler is None and state is not None and state.scaled:
            raise ConfigError(
                "a GradScaler is used with a lossy wire: when the loss scale changes, the wire's "
                "error-feedback residuals must be rescaled too; call world.track(scaler) before "
                "the first step."
            )

    def _refuse_unexchanged(self) -> None:
        """Refuse gradients that are incomplete, or not exchanged; a plain step would use them."""
        self._binding.require_gradients()
        for p in self._binding.trained.unowned:
            if p.grad is not None and p in self._binder.trained().unowned:  # still
                raise ConfigError(
                    f"{self._binding.trained.names[p]} has a gradient, but no optimizer that was "
                    "given to paceline.parallelize() has it: give its optimizer too, in a list, or "
                    "freeze it by requires_grad_(False)."
                )
        for p in self._binding.not_exchanged(self._optimizer):
            if p.grad is not None:
                name = self._binding.trained.names.get(p, f"a new parameter, {tuple(p.shape)},")
                raise ConfigError(
                    f"{name} has a gradient that is not exchanged: freeze, unfreeze and add "
                    "parameters only between steps, and set .grad = None on frozen ones."
                )

    def _train(
        self, plain: Callable[[bool], nn.Module], model: nn.Module, mode: bool = True
    ) -> nn.Module:
        """Replace `model.train()`, which `eval()` calls too."""
        if not mode:
            self.settle_for_use()
        return plain(mode)

    def _zero_optimizer(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        """Replace `optimizer.zero_grad()`, which may write gradients that are being sent."""
        with self._before_zeroing(set_to_none):
            self._plain_zero(set_to_none)

    def _zero_model(
        self, plain: Callable[[bool], None], model: nn.Module, set_to_none: bool = True
    ) -> None:
        """Replace `model.zero_grad()`, likewise."""
        with self._before_zeroing(set_to_none):
            plain(set_to_none)

    @contextmanager
    def _before_zeroing(self, set_to_none: bool) -> Iterator[None]:
        """Wait until gradients may be zeroed inside; before `optimizer.step()`, reduce them."""
        if self._hooks is None:
            yield
            return
        if self._watch.gap is Gap.GRADIENTS:
            self.reduce()
        if not set_to_none:
            self._binding.access.wait_writable()
            self._binding.kept.forget()
        with self._watch.paused():
            yield


def _has_hooks(optimizer: Optimizer, when: str) -> bool:
    """Return whether hooks run before ("pre") or after ("post") an optimizer's step."""
    own = getattr(optimizer, f"_optimizer_step_{when}_hooks")
    return bool(own or getattr(optimizers, f"_global_optimizer_{when}_hooks"))


def _versions(parameters: Iterable[nn.Parameter]) -> list[tuple[int, int]]:
    """Return what a write or a conversion of parameters changes: versions and addresses."""
    return [(p._version, p.data_ptr()) for p in parameters]
