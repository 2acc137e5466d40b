"""Hooks that tie one set of trained parameters to a synchronizer, on gradients and on readers.

They live until other parameters are trained (a layer is frozen, say), or another exchange is used;
then the replica makes others. Their first step traces the reads (`read_tracing.py`), unless an
earlier one of the same parameters did; until then the module that registers a parameter waits for
it.

In the first step gradients are sent when the optimizer steps. If several backward passes have added
to the same gradient by then, so it is in all steps; otherwise, a bucket is sent from the second
step on as soon as backward has completed its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from paceline.algorithms.method import Method
from paceline.algorithms.synchronizer import STATISTICS, StepInfo
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket
from paceline.reduce.rank_state import restore_parts
from paceline.replica.buffer_broadcast import BufferBroadcast
from paceline.replica.checksums import Parts
from paceline.replica.compiled_modules import around_call, is_compiled, visible_modules
from paceline.replica.copier import Copier
from paceline.replica.earlier_buffers import EarlierBuffers
from paceline.replica.hook_guard import HookGuard
from paceline.replica.live_hooks import LiveHook
from paceline.replica.model_list import roots_of
from paceline.replica.read_tracing import Readers, ReadMap, ReadTracer, registering_modules
from paceline.replica.trained_parameters import TrainedParameters
from paceline.update.kept_gradients import KeptGradients
from paceline.update.parameter_watch import Gap, GradientGuard, ParameterWatch

_Hook = Callable[[Tensor], None]
_MakeHook = Callable[[int], _Hook]


class ReplicaHooks:
    """Hooks on a model that call `before_read` and `gradient_ready` of a synchronizer.

    Args:
        buckets: the buckets of the parameters whose gradients are exchanged.
        method: exchanges them.
        watch: of the trained parameters.
        reads: which modules read which parameters, if that was traced before.
        earlier: the buffers before the next step's batches.

    Attributes:
        synchronizer: the synchronizer of their gradients.
        access: the access to these gradients.
        state: what this rank alone has, if anything.
        immediate: whether no update is ever pending.
        gradients: the gradients of the current step.
        exchanging: whether gradients are sent as soon as they are complete; otherwise, they
            accumulate.
        reads: which modules read which parameters; None until the first step has traced the reads.
        copier: copies the state before the current step, if a snapshot is taken in it.
        kept: the gradients that the script keeps after a step.
        rounds: None: weights are equal between two steps.
        added_to_kept: whether a backward has added to a gradient of an earlier step.
        buffers: broadcasts the buffers that the model computes; None: they are this rank's own.
    """

    rounds = None
    buffers: BufferBroadcast | None = None

    def __init__(
        self,
        model: nn.Module,
        trained: TrainedParameters,
        buckets: Sequence[Bucket],
        method: Method,
        watch: ParameterWatch,
        reads: ReadMap | None,
        earlier: EarlierBuffers,
    ) -> None:
        self.trained = trained
        assert method.gradients is not None
        self.buckets = tuple(buckets)
        self.synchronizer = method.synchronizer
        self.access = method.gradients
        self.state = method.state
        self.immediate = method.immediate
        self._watch = watch
        self._earlier = earlier
        self._watches_backward = False
        self._hooked: dict[int, nn.Parameter] = {}  # by index, the parameters with hooks
        self._versions: list[int] = []  # theirs, when a backward reached the first one
        self.gradients = StepGradients(self.buckets)
        self._frozen = [p for p in trained.groups if p not in self.gradients.parameters]
        self.kept = KeptGradients()
        self._weight = 1.0
        self.added_to_kept = False
        self._last: tuple[ref[Tensor], int] | None = None  # the first gradient after a step
        self.exchanging = True
        self.copier: Copier | None = None
        self._model = model
        self._running = False
        self._left: set[Bucket] = set()  # those that no module has waited for in this step
        self._reading = False  # a module has waited in this step
        self._unread: tuple[Bucket, ...] = ()  # no module waits for them: updated in `end`
        self._waits = ExitStack()  # closed, it removes the waits from the model
        self._handles: list[RemovableHandle] = []
        self._hook_guard = HookGuard(list(self.gradients.parameters), self.gradients.names)
        self.reads: ReadMap | None = None
        self._tracer: ReadTracer | None = None
        if reads is not None:
            self._use_reads(reads)
        else:
            self._hook_gradients(self._added_hook)
            self._wait_in(registering_modules(model))
            self._tracer = ReadTracer(model)

    def begin(self, step: StepInfo) -> None:
        """Start a step."""
        weight = step.weight
        self._running = True
        self.copier = None  # one that a failed step left is given up
        self._reading = False
        self._left.update(self.buckets)
        self._watches_backward = False
        if self.kept.shown:
            self._hide_means()
        if self.kept.weight is not None and self.kept.weight != weight:
            self._rescale_kept(weight)
        changed = (weight == 1) is not (self._weight == 1)
        self._weight = weight
        if changed and self.immediate and self.reads is not None:
            self._hook_gradients(self._hook_of(self.reads))
        self.gradients.begin(step.number)
        self.synchronizer.begin(step)

    def begin_snapshot(
        self,
        copier: Copier,
        *,
        settled: bool,
        names: Mapping[nn.Parameter, str] | None = None,
    ) -> None:
        """Copy the state before the step that has begun, its parameters as soon as they are read.

        Args:
            copier: copies it.
            settled: no update is pending, so that all can be copied at once.
            names: the names of all parameters, by default of those that are bound.
        """
        self.copier = copier
        names = self.trained.names if names is None else names
        with self._watch.paused():
            copier.begin(names, self.gradients.parameters, self._earlier.values)
            if settled or self._tracer is not None:  # which would take the copies for reads
                copier.copy_buckets(self.buckets)

    def end_snapshot(self) -> None:
        """Copy what hasn't been read, and the rank's own state, before the step's update."""
        if self.copier is not None:
            self.access.complete()
            self.copier.copy_buckets(self.buckets)
            self.copier.end(self.state)
            self.copier = None

    def settle(self) -> None:
        """Settle, and copy what a snapshot lacks, because a script may write it from now on."""
        self.synchronizer.settle()
        if self.copier is not None:
            self.copier.copy_buckets(self.buckets)

    def end(self) -> None:
        """End the step, and update at once the buckets that no module waits for."""
        self._running = self._reading = False
        self.gradients.expect_none()
        self.gradients.guard.clear()
        self._end_kept()
        for bucket in self._unread:
            self.synchronizer.before_read(bucket)

    def finish_tracing(self) -> None:
        """After the first step, use the reads that it has traced."""
        if self._tracer is None:
            return
        reads = self._tracer.finish(self.gradients.parameters)
        self._tracer = None
        self._use_reads(reads)
        for bucket in self._unread:
            self.synchronizer.before_read(bucket)

    def install_statistics(self) -> None:
        """Install BatchNorm's running statistics of the last ended step; local, as `settle`."""
        self.synchronizer.before_read(STATISTICS)

    def gather(self, communicator: Communicator) -> Mapping[str, Any] | None:
        """Return all ranks' state on rank 0; as `Replica.state`, when all have settled."""
        return None if self.state is None else self.state.gather(communicator)

    def restore(self, state: Mapping[str, Any], communicator: Communicator) -> bool:
        """Take this rank's share of what `gather` returned; return False if some was dropped."""
        return self.state is not None and self.state.restore(state)

    def enter(
        self,
        parts: Sequence[Mapping[str, Any]],
        snapshot: Parts | None,
        communicator: Communicator,
    ) -> bool:
        """Restore the parts of a snapshot, which the model has; as `Replica.enter_generation`."""
        whole = restore_parts(self.state, parts, communicator)
        if self.state is not None and self.state.masters is not None:
            self.state.masters.round(communicator)  # the snapshot has no narrow parameters
        return whole

    def close(self, *, drain: bool = False) -> None:
        """Remove the hooks and close the synchronizer."""
        self._watch.end()
        if self._tracer is not None:
            self._tracer.finish(())
        self._hook_guard.close()
        self._hook_gradients(None)
        self._waits.close()
        self.synchronizer.close(drain=drain)

    def _use_reads(self, reads: ReadMap) -> None:
        self.reads = reads
        self._hook_gradients(self._hook_of(reads))
        self._wait_in(reads.readers)
        self._unread = tuple(
            bucket for bucket in self.buckets if not reads.outside.isdisjoint(bucket.parameters)
        )

    def _hook_of(self, reads: ReadMap) -> _MakeHook:
        return self._added_hook if reads.accumulates else self._done_hook

    def _hook_gradients(self, make: _MakeHook | None) -> None:
        """Call a hook after each accumulation of a gradient, or none, given a parameter's index.

        Where gradients are the means as backward leaves them, a misuse changes no result. There the
        first and the last parameter stand for all, because a hook takes about a microsecond.
        """
        for handle in self._handles:
            handle.remove()
        hooked = dict(enumerate(self.gradients.parameters))
        if self._are_means:
            hooked = dict([*hooked.items()][:: max(1, len(hooked) - 1)])
        self._hooked = hooked
        self._handles = [
            _hook_gradient(p, make(index))  # which no copy of a parameter has
            for index, p in hooked.items()
            if make is not None
        ]

    @property
    def _are_means(self) -> bool:
        """Whether gradients are the means as backward leaves them, and the reads are traced."""
        return self.immediate and self._weight == 1 and self.reads is not None

    def _gradient_added(self, index: int, parameter: Tensor) -> None:
        """Note a gradient that is sent when the optimizer steps: more may be added until then."""
        if not self._running:
            return
        assert isinstance(parameter, nn.Parameter)
        if not index and self._last is not None:
            self._note_added(parameter)
        if self.gradients.reduced:
            self._exchange_again()
        if self.exchanging or self.gradients.added:
            if not self._watches_backward:
                self._watch_backward()
            repeated = self.gradients.add_unsent(index)
            if self._tracer is not None:
                self._tracer.accumulates |= repeated
        if self._tracer is not None:
            self._tracer.used.add(parameter)

    def _added_hook(self, index: int) -> _Hook:
        return partial(self._gradient_added, index)

    def _done_hook(self, index: int) -> _Hook:
        """Make a hook that notes a gradient, and sends its bucket once that is complete.

        Autograd calls a closure in half of the time of a `partial` of a method.
        """
        gradients = self.gradients
        number = gradients.numbers[index]
        bucket = self.buckets[number]
        indices = gradients.indices[number]

        def done(parameter: Tensor) -> None:
            if not gradients.open[index]:
                self._open_gradients(index, parameter)
                if not gradients.open[index]:
                    return
            gradients.open[index] = False
            gradients.remaining[number] -= 1
            if not gradients.remaining[number]:
                gradients.note(indices)
                self.synchronizer.gradient_ready(bucket)

        return done

    def _open_gradients(self, index: int, parameter: Tensor) -> None:
        """Expect gradients until the end of a backward, whose first one this is, or expect none."""
        if not self._running:
            return
        assert isinstance(parameter, nn.Parameter)
        self.require_kept_gradients()
        if not index and self._last is not None:
            self._note_added(parameter)
        if self.gradients.reduced:
            self._exchange_again()
        self.gradients.require_expected(index)
        if self.exchanging:
            if not self._watches_backward:
                self._watch_backward()
            self.gradients.expect()
        else:
            self.gradients.take(range(index, index + 1))

    def before_backward(self, *, alone: bool) -> None:
        """Look for a script's hooks that change gradients in the backward that follows.

        Args:
            alone: whether there is one rank.
        """
        exchanged = self._running or not self.exchanging
        self._hook_guard.look(self._handles, compares=exchanged and not alone)

    def note_kept(self) -> None:
        """Note which gradients are kept, before backward passes outside of a step."""
        if not self._running:
            with self._watch.paused():
                self.kept.note(self.gradients.parameters)

    def expose_gradients(self, parameter: Tensor) -> None:
        """Make every `.grad` the mean, after a step; as `GradientAccess.expose`."""
        with self._watch.paused():
            own = {p: p.grad for p in self.gradients.parameters}
        self.access.expose(parameter)
        with self._watch.paused():
            self.kept.show(own)

    def _hide_means(self) -> None:
        with self._watch.paused():
            self.kept.hide()

    def _rescale_kept(self, weight: float) -> None:
        """Rescale what is kept for a step of another weight."""
        parameters = self.gradients.parameters
        with self._watch.paused():
            if any(p.grad is not None for p in parameters):
                self.access.wait_writable()
            self.kept.rescale(parameters, weight)

    def _end_kept(self) -> None:
        """Take note that what is kept from now on is of the step that ends."""
        first = next(iter(self.gradients.parameters), None)  # a pipeline's frozen stage has none
        gradient = None if first is None else first.grad
        self._last = None if gradient is None else (ref(gradient), gradient._version)
        weight = None if self.gradients.reduced else self._weight
        if self.kept.refused or self.kept.before is not None:
            self.kept.end_step(weight)
        else:
            self.kept.weight = weight

    def _exchange_again(self) -> None:
        """Begin another exchange of the step, in a backward after the first one's was reduced.

        What is sent then is the mean that was reduced, plus this rank's new gradient. Ranks'
        weights add up to one, so the sum is the mean plus the new one's.
        """
        self.access.begin_again()
        self.gradients.begin_again()

    def not_exchanged(self, optimizer: Optimizer) -> Sequence[nn.Parameter]:
        """Return the optimizer's present parameters that aren't exchanged."""
        groups = [group["params"] for group in optimizer.param_groups]
        if not self.trained.fingerprint.lists(groups):
            return [p for group in groups for p in group if p not in self.gradients.parameters]
        return self._frozen

    def require_gradients(self) -> None:
        """Require that the gradients may be used for an update.

        Raises:
            ConfigError: a backward pass ended with an error that the script caught, or a gradient
                is kept that mustn't be sent.
        """
        self.require_kept_gradients()
        if self._watches_backward:
            raise ConfigError(
                "a backward pass of this step ended with an error that the script caught, so its "
                "gradients are incomplete: let the error end the script, or end the step without "
                "optimizer.step() on all ranks alike."
            )

    def _note_added(self, parameter: nn.Parameter) -> None:
        """Note whether backward has added to the first gradient of an earlier step, unwritten."""
        assert self._last is not None
        (kept, version) = self._last
        self._last = None
        with torch._C.DisableTorchFunctionSubclass():  # this is no use of it by the script
            gradient = parameter.grad
        if gradient is not None and gradient is kept() and gradient._version == version + 1:
            self.added_to_kept = True

    def require_kept_gradients(self) -> None:
        """Require that no gradient is kept that mustn't be sent; raises as `require_gradients`."""
        if self.kept.refused:
            for index, parameter in enumerate(self.gradients.parameters):
                self._require_zeroed(index, parameter)

    def _require_zeroed(self, index: int, parameter: nn.Parameter) -> None:
        name, step = self.gradients.name_and_step(index)
        self.kept.require_zeroed(parameter, name, step)

    def _watch_backward(self) -> None:
        """Watch the parameters until the end of this backward, and the gradients from there on."""
        self._watch.end()
        self._watches_backward = True
        for bucket in self.buckets:  # updates that no forward has installed
            self.synchronizer.before_read(bucket)
        self._versions = [p._version for p in self._hooked.values()]
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self.gradients.expect_none()
        if self._running and self._watches_backward:
            self._watches_backward = False
            if self._last is not None and self.gradients.arrived(0):
                self._note_added(next(iter(self.gradients.parameters)))
            self._refuse_written()
            if self._are_means:
                self.gradients.note_present(self._hooked)
            self._watch.begin(Gap.GRADIENTS)

    def _refuse_written(self) -> None:
        """Refuse parameters that were written during this backward."""
        parameters = self._hooked.values()
        before = self._versions
        if before == [p._version for p in parameters]:
            return
        changed = (
            p for p, version in zip(parameters, before, strict=True) if p._version != version
        )
        raise _stepped_inside(f"{self.trained.names[next(changed)]} was written")

    def _wait_in(self, readers: Readers) -> None:
        """Make each reader wait for its buckets, and the end of the forward for all others.

        So code outside of the model reads no parameter before its update. A module that a script
        calls by itself has no such end: it waits for all buckets. Where no update is ever pending,
        what is left to do before a forward is to copy the buffers.
        """
        self._waits.close()
        bucket_of = self.gradients.parameters
        if self.immediate:
            for module in visible_modules(self._model):
                if next(module.buffers(recurse=is_compiled(module)), None) is not None:
                    self._wait_before(module, ())
            return
        for module, parameters in readers.items():
            buckets = dict.fromkeys(bucket_of[p] for p in parameters if p in bucket_of)
            self._wait_before(module, tuple(buckets))
        for root in roots_of(self._model):
            if not is_compiled(root):
                wait = self._wait_for(self.buckets)
                self._waits.callback(root.register_forward_hook(wait).remove)
                before = root.register_forward_pre_hook(LiveHook(self._end_watch), prepend=True)
                self._waits.callback(before.remove)

    def _end_watch(self, *_: object) -> None:
        """Watch no pending update any more: a forward of the whole model begins, and waits."""
        if self._watch.gap is Gap.UPDATES:
            self._watch.end()

    def _wait_before(self, module: nn.Module, buckets: tuple[Bucket, ...]) -> None:
        wait = self._wait_for(buckets)

        @contextmanager
        def waited() -> Iterator[None]:
            wait()
            with self._watch.paused():  # which would be compiled, too
                yield

        if is_compiled(module):
            self._waits.callback(around_call(module, waited))
        else:
            self._waits.callback(module.register_forward_pre_hook(wait, prepend=True).remove)

    def _wait_for(self, buckets: tuple[Bucket, ...]) -> LiveHook:
        left = self._left

        def wait(*_: object) -> None:
            if self._reading and left.isdisjoint(buckets):
                return
            waited = buckets
            if self._watch.gap is Gap.UPDATES:  # no forward of the whole model has begun
                self._watch.end()
                waited = tuple(self.buckets)
            if self.kept.shown:
                self._hide_means()
            if not self._running:  # the forward of a batch whose gradients accumulate, say
                self.install_statistics()
                if self.buffers is not None:
                    self.buffers.install()
                if self._earlier.due:
                    self._earlier.copy()
            for bucket in waited:
                self.synchronizer.before_read(bucket)
            if self.copier is not None:
                self.copier.copy_buckets(waited)
            if self._running:
                self._reading = True
                left.difference_update(waited)

        return LiveHook(wait)


class StepGradients:
    """Gradients of the current step: readiness per bucket, and a guard against late writes.

    Parameters are identified by index, because a dictionary look-up would take longer than
    everything else that a hook does. What must be looked at in each gradient is looked at for a
    bucket at once. `GradScaler.unscale_` writes gradients without incrementing autograd's version
    counters; a few values of one gradient are therefore retained, and compared with the gradient
    when a scaler steps.

    Args:
        buckets: the buckets to exchange.

    Attributes:
        parameters: the exchanged parameters with their buckets; a parameter's index is its position
            in this list.
        names: the names of the parameters.
        numbers: for each parameter, the number of its bucket.
        indices: for each bucket, the indices of its parameters.
        open: for each parameter, whether a backward is under way that may complete its gradient.
        remaining: for each bucket, the number of gradients that it has yet to get.
        reduced: whether they are the global means, and may be written.
        added: the indices of those that `add_unsent` got.
        guard: guard of the gradients that were sent.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.parameters = {p: bucket for bucket in buckets for p in bucket.parameters}
        self.numbers = [bucket.index for bucket in buckets for _ in bucket.parameters]
        self._buckets = buckets
        self.names = [name for bucket in buckets for name in bucket.names]
        self._list = list(self.parameters)
        self.reduced = False
        self.guard = GradientGuard(self._list, self.names)
        self._sizes = [len(bucket.parameters) for bucket in buckets]
        ends = accumulate(self._sizes)
        self.indices = [range(n - size, n) for n, size in zip(ends, self._sizes, strict=True)]
        self._none = [False] * len(self.numbers)
        self.begin(0)

    def begin(self, number: int) -> None:
        """Expect all gradients of a step."""
        self._number = number
        self.begin_again()

    def begin_again(self) -> None:
        """Expect all gradients once more."""
        self.reduced = False
        self._expected = [True] * len(self.numbers)
        self.remaining = list(self._sizes)
        self.expect_none()
        self.added: set[int] = set()
        self._sample: tuple[nn.Parameter, Tensor] | None = None  # a few values, as they were sent
        self._sample_unchanged: Tensor | None = None  # whether they were equal before the reduction

    def expect(self) -> None:
        """Expect the gradients that are still missing: a backward has begun."""
        self.open = self._expected

    def expect_none(self) -> None:
        """Expect none: no backward whose gradients are sent is under way."""
        self.open = self._none

    def arrived(self, index: int) -> bool:
        """Return whether a parameter's gradient was completed."""
        return not self._expected[index]

    def name_and_step(self, index: int) -> tuple[str, int]:
        """Return a parameter's name, and the step's number."""
        return self.names[index], self._number

    def require_expected(self, index: int) -> None:
        """Require that a gradient that backward has completed wasn't sent before.

        Raises:
            ConfigError: it was.
        """
        if not self._expected[index]:
            raise ConfigError(
                f"the gradient of {self.names[index]} was accumulated twice in step "
                f"{self._number}: under no_sync(), run every backward pass of a step except the "
                "last; call reduce() only after the last; if the model uses activation "
                "checkpointing, give it use_reentrant=False."
            )

    def note_present(self, indices: Iterable[int]) -> None:
        """Note those of some gradients that are there, where none is sent in backward."""
        for index in indices:
            if (gradient := self._list[index].grad) is not None:
                self.guard.note(range(index, index + 1), [gradient])

    def add_unsent(self, index: int) -> bool:
        """Note a gradient that will be sent later; return whether it was noted in this step before.

        Args:
            index: the parameter's index.

        Raises:
            ConfigError: as `take`.
        """
        self.note(range(index, index + 1))
        repeated = index in self.added
        self.added.add(index)
        return repeated

    def take(self, indices: range) -> list[Tensor]:
        """Return the gradients of some parameters of a bucket, which backward has completed.

        Raises:
            ConfigError: one is missing, or is sparse and its bucket isn't.
        """
        gradients = [p.grad for p in self._list[indices.start : indices.stop]]
        layouts = [None if gradient is None else gradient.layout for gradient in gradients]
        if layouts.count(torch.strided) < len(layouts):
            for index, gradient in zip(indices, gradients, strict=True):
                if gradient is None:
                    raise _stepped_inside(f"the gradient of {self.names[index]} was removed")
                if gradient.is_sparse and not self._buckets[self.numbers[index]].row_sparse:
                    raise self._sparse(index)
        return gradients  # type: ignore[return-value]  # none is None

    def before_reduce(self) -> None:
        """Check that sent gradients are unwritten, and accept no more; then `.grad` may be written.

        Raises:
            ConfigError: a sent gradient was written, replaced or removed.
        """
        self.guard.check(self._number)
        if self._sample is not None and (now := self._sample[0].grad) is not None:
            sent = self._sample[1]
            self._sample_unchanged = ((_first_values(now) == sent) | sent.isnan()).all()
        self._expected = self._none
        self.expect_none()
        self.reduced = True

    def reduced_as_sent(self) -> bool:
        """Return whether gradients were the same when they were sent and when they were reduced."""
        return self._sample_unchanged is None or bool(self._sample_unchanged)

    def note(self, indices: range) -> None:
        """Note gradients of a bucket: of all that it has once it is complete, and is sent now.

        Raises:
            ConfigError: as `take`.
        """
        gradients = self.take(indices)
        self.guard.note(indices, gradients)
        parameter = self._list[indices.start]
        if self._sample is None or self._sample[0] is parameter:
            self._sample = (parameter, _first_values(gradients[0]).clone())

    def _sparse(self, index: int) -> ConfigError:
        return ConfigError(
            f"the gradient of {self.names[index]} is sparse, which is supported for the weights "
            "of nn.Embedding and nn.EmbeddingBag with SGD, Adagrad or SparseAdam: create the layer "
            "with sparse=True before parallelize() and use one of these, or create it with "
            "sparse=False."
        )


def _hook_gradient(parameter: nn.Parameter, hook: _Hook) -> RemovableHandle:
    """Call a hook after each accumulation of a gradient, of a frozen parameter once it is not."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(trained)
    return handle


def _stepped_inside(change: str) -> ConfigError:
    """Return the error of a change that an optimizer makes which runs inside backward."""
    return ConfigError(
        f"{change} during backward: an optimizer that steps in a hook of backward uses this rank's "
        "gradients alone, so call optimizer.step() after backward."
    )


def _first_values(gradient: Tensor) -> Tensor:
    """View the first few values of a gradient, of a sparse one those of its rows."""
    gradient = gradient._values() if gradient.is_sparse else gradient
    return gradient.detach().reshape(-1)[:16]
