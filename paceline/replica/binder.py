"""Binds a replica's trained parameters to a synchronizer: at the start, anew, in each generation.

    bind            rank 0's values of what is new, buckets, a synchronizer, hooks
    bind_anew       other parameters are trained, or another exchange continues: state is carried on
    leave, enter    the next generation: state comes from a snapshot that all its ranks restored

State that is divided among the ranks (shards, residuals) is gathered where the division changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.algorithms.method import BucketPlan, Method, MethodBuilder
from paceline.comm.communicator import (
    Communicator,
    broadcast_all,
    broadcast_state,
    require_same_call,
    shortened,
)
from paceline.generation.run import Run
from paceline.reduce.buckets import Bucket, partition
from paceline.replica.averaged_hooks import AveragedHooks
from paceline.replica.checksums import Parts
from paceline.replica.hooks import ReplicaHooks
from paceline.replica.live_hooks import LiveHook
from paceline.replica.load_watch import LoadWatch
from paceline.replica.read_tracing import ReadMap
from paceline.replica.trained_parameters import Fingerprint, Scope, TrainedParameters
from paceline.update.updater import is_bucketwise

Binding = ReplicaHooks | AveragedHooks


class Bindable(Protocol):
    """Protocol of a replica, as far as its binder needs it."""

    def settle_for_use(self) -> None:
        """Settle before a state dict is made or loaded."""

    def make_hooks(
        self,
        trained: TrainedParameters,
        buckets: Sequence[Bucket],
        method: Method,
        reads: ReadMap | None,
    ) -> Binding:
        """Make the hooks of a binding."""


class ReplicaBinder:
    """Binder of a model and its optimizer to one synchronizer after another.

    Args:
        replica: the replica that is bound.
        run: the run, whose ranks are to be equal.
        purpose: of the group by which they become so.
        builder: makes the methods.
        scope: what the replica has of its model.

    Attributes:
        hooks: the present binding; None between generations.
        bindings: how often parameters were bound to a synchronizer.
        stateful: whether state is divided among ranks in the present binding, or was in the last;
            the same on all.
        bucketwise: whether the optimizer may update bucket by bucket.
        alone: whether there is one rank.
        divides_optimizer: whether each rank has shards of the optimizer's state.
        loads: watches what a script loads between two steps.
    """

    def __init__(
        self,
        replica: Bindable,
        model: nn.Module,
        optimizer: Optimizer,
        run: Run,
        purpose: str,
        builder: MethodBuilder,
        scope: Scope,
    ) -> None:
        self._replica = replica
        self._model = model
        self._optimizer = optimizer
        self._run = run
        self._purpose = purpose
        self._builder = builder
        self._scope = scope
        self._plan = self._first_plan()
        self._state_hooks = ExitStack()
        self.bindings = 0
        self.stateful = False
        self.bucketwise = False
        self.alone = False
        self.divides_optimizer = False
        self.loads = LoadWatch(model)
        self.hooks: Binding | None = None

    def trained(self) -> TrainedParameters:
        """List the present parameters; raises as `bind`."""
        return TrainedParameters.of(self._model, self._optimizer, self._scope)

    def bind(self, known: set[Tensor], reads: ReadMap | None = None) -> Binding:
        """Bind the present parameters; collective.

        Args:
            known: tensors that are equal on all ranks; others become so.
            reads: which modules read which parameters, if that was traced before.

        Raises:
            ConfigError: a lazy module has no shapes yet, or the optimizer is not supported.
        """
        trained = self.trained()
        fresh = [tensor for tensor in trained.tensors if tensor not in known]
        broadcast_all(self._ranks, fresh, "the broadcast of rank 0's weights")
        size = self._plan.bucket_bytes
        rows = frozenset[nn.Parameter]() if self._plan.dense else trained.row_sparse
        buckets = partition(trained.names, trained.groups, size, rows)
        method = self._builder.method(buckets, self._run.context)
        self.alone = self._ranks.world_size == 1
        self.bindings += 1
        own = method.state
        self.stateful = own is not None or method.rounds is not None
        self.divides_optimizer = own is not None and own.divides_optimizer
        self.bucketwise = is_bucketwise(self._optimizer)
        self.hooks = self._replica.make_hooks(trained, buckets, method, reads)
        return self.hooks

    def bind_anew(self, plan: BucketPlan | None, *, same: bool) -> Binding:
        """Settle, and bind the present parameters; collective. New ones get rank 0's values.

        Args:
            plan: of the method that continues; None: the present one.
            same: the trained parameters are the same as before.
        """
        old = self._bound
        self._plan = plan or self._plan
        stateful = self.stateful
        state = self.state()
        self.unbind(drain=True)
        new = self.bind(set(old.trained.tensors), old.reads if same else None)
        if stateful:
            what = "the broadcast of per-rank state"
            self.restore(broadcast_state(self._ranks, state, what))
        self.settle_before_states()
        return new

    def require_same_additions(self, names: Sequence[str]) -> None:
        """Settle, and require that all ranks' models have got the same tensors; collective.

        Args:
            names: of the parameters and buffers that this rank's model has got.

        Raises:
            ConfigError: another rank's model has got others; names both.
            CommError: a peer was lost or silent, because its model has got none, say.
        """
        self._replica.settle_for_use()
        text = shortened(names)
        require_same_call(
            self._ranks,
            "world.step() with a changed model",
            f"the new {text}",
            f"world.step() with the new {text}, which must be the same on all ranks",
            remedy="register the same modules, parameters and buffers on all ranks",
        )

    def leave(self) -> None:
        """Remove the hooks and close the synchronizer, without a wait, until `enter`.

        Where `enter` failed, there may be none.
        """
        self.loads.take()  # of a step that isn't made
        if self.hooks is not None:
            self._trained = self.hooks.trained
            self._reads = self.hooks.reads
            self.unbind()
            self.hooks = None

    def enter(
        self, parts: Sequence[Mapping[str, Any]] | None, snapshot: Parts | None
    ) -> tuple[Binding, bool]:
        """Bind in the next generation; as `Replica.enter_generation`.

        Returns:
            the binding, and whether all of the parts was restored.
        """
        same = Fingerprint(self._optimizer) == self._trained.fingerprint
        present = self.trained()
        self._plan = self._first_plan()
        bound = self.bind(set(present.tensors), self._reads if same else None)
        self.settle_before_states()
        return bound, parts is None or bound.enter(parts, snapshot, self._ranks)

    def state(self) -> Mapping[str, Any] | None:
        """Settle, and return the ranks' own state; as `Replica.state`."""
        self._replica.settle_for_use()
        return self._bound.gather(self._ranks)

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Restore on all ranks what `state` returned; return False if some of it was dropped."""
        return self._bound.restore(state, self._ranks)

    def settle_before_states(self) -> None:
        """Settle before each state dict of the model and the optimizer is made or loaded.

        Averaged weights need nothing settled: their hooks show those of the last merge.
        """
        if self._bound.rounds is not None:
            return
        settle_first = LiveHook(lambda *_: self._replica.settle_for_use())
        before_load = LiveHook(self._before_load)
        targets: list[Any] = [*self._model.modules(), self._optimizer]
        for target in targets:
            saved = target.register_state_dict_pre_hook(settle_first)
            loaded = target.register_load_state_dict_pre_hook(before_load)
            self._state_hooks.callback(saved.remove)
            self._state_hooks.callback(loaded.remove)

    def _before_load(self, target: Any, state: Mapping[str, Any], *_: object) -> None:
        """Settle before a state dict is loaded into a module or the optimizer, and note it."""
        self._replica.settle_for_use()
        if target is not self._optimizer:
            self.loads.before_model()
        elif self.divides_optimizer:
            self.loads.before_optimizer(state)

    def unbind(self, *, drain: bool = False) -> None:
        """Remove all hooks and close the synchronizer; without a wait, unless it drains."""
        if self.hooks is not None:
            self.hooks.close(drain=drain)
        self._state_hooks.close()

    def _first_plan(self) -> BucketPlan:
        plan = self._builder.plan(begins=True)
        assert plan is not None
        return plan

    @property
    def _ranks(self) -> Communicator:
        return self._run.context.group("data", self._purpose)

    @property
    def _bound(self) -> Binding:
        assert self.hooks is not None, "the replica is in no generation"
        return self.hooks
