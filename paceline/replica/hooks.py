"""Ties one set of trained parameters to a synchronizer: hooks on gradients and on their readers.

Lives until other parameters are trained (a layer is frozen, say), or by another exchange; then the
replica makes another. Its first step is a lesson about who reads what (`readers.py`), unless an
earlier one of the same parameters was; until then each parameter's owner waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from paceline.algorithms.synchronizer import Synchronizer
from paceline.reduce.buckets import Bucket
from paceline.replica.compiled_modules import around_call, is_compiled
from paceline.replica.gradient_guard import GradientGuard
from paceline.replica.read_tracing import Readers, ReadMap, ReadTracer, owners
from paceline.replica.trained_parameters import TrainedParameters


class ReplicaHooks:
    """Calls `before_read` and `gradient_ready` of a synchronizer.

    Attributes:
        exchanging: gradients are sent as they arrive; otherwise they accumulate.
        reads: who reads what, once it is known.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: TrainedParameters,
        synchronizer: Synchronizer,
        reads: ReadMap | None = None,
    ) -> None:
        self.trained, self.synchronizer = trained, synchronizer
        self.gradients = GradientGuard(synchronizer.buckets, trained.names)
        self.exchanging = True
        self._model = model
        self._running = False
        self._prompt: tuple[Bucket, ...] = ()  # read where nobody can wait: updated in `end`
        self._undo_waits: list[Callable[[], None]] = []
        self.reads: ReadMap | None = None
        self._tracer: ReadTracer | None = None
        if reads is not None:
            self._follow(reads)
        else:
            self._wait_in(owners(model))
            self._tracer = ReadTracer(model)
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._gradient_done, place))
            for place, p in enumerate(self.gradients.parameters)
        ]

    def begin(self, number: int, weight: float, scale: float) -> None:
        """Start a step."""
        self._running = True
        self.gradients.begin(number)
        self.synchronizer.begin(number, weight, scale)

    def end(self) -> None:
        """End the step, and update at once what nobody could wait for."""
        self._running = False
        self.gradients.end()
        for bucket in self._prompt:
            self.synchronizer.before_read(bucket)

    def learn(self) -> None:
        """Take from the first step, which is over, who reads what."""
        if self._tracer is None:
            return
        outside = self._tracer.outside(self.gradients.parameters)
        readers = self._tracer.finish()
        self._tracer = None
        self._follow(ReadMap(readers=readers, outside=outside))
        for bucket in self._prompt:
            self.synchronizer.before_read(bucket)

    def close(self) -> None:
        """Take the hooks off and close the synchronizer."""
        if self._tracer is not None:
            self._tracer.finish()
        for handle in self._handles:
            handle.remove()
        self._undo_all_waits()
        self.synchronizer.close()

    def _follow(self, reads: ReadMap) -> None:
        self.reads = reads
        self._wait_in(reads.readers)
        self._prompt = tuple(
            bucket
            for bucket in self.synchronizer.buckets
            if not reads.outside.isdisjoint(bucket.parameters)
        )

    def _gradient_done(self, place: int, parameter: Tensor) -> None:
        if not self._running:
            return
        assert isinstance(parameter, nn.Parameter)
        if self._tracer is not None:
            self._tracer.use(parameter)
        bucket = self.gradients.arrive(place, parameter, exchanging=self.exchanging)
        if bucket is not None:
            self.synchronizer.gradient_ready(bucket)

    def _wait_in(self, readers: Readers) -> None:
        """Make each reader wait for its buckets, and the model's end for what is left."""
        self._undo_all_waits()
        bucket_of = self.gradients.parameters
        for module, parameters in readers.items():
            buckets = dict.fromkeys(bucket_of[p] for p in parameters if p in bucket_of)
            self._wait_before(module, tuple(buckets))
        if not is_compiled(self._model):
            wait = self._wait_for(self.synchronizer.buckets)
            self._undo_waits.append(self._model.register_forward_hook(wait).remove)

    def _wait_before(self, module: nn.Module, buckets: tuple[Bucket, ...]) -> None:
        wait = self._wait_for(buckets)

        @contextmanager
        def waited() -> Iterator[None]:
            wait()
            yield

        if is_compiled(module):
            self._undo_waits.append(around_call(module, waited))
        else:
            self._undo_waits.append(module.register_forward_pre_hook(wait, prepend=True).remove)

    def _wait_for(self, buckets: tuple[Bucket, ...]) -> Callable[..., None]:
        """Make a hook; a function, which a copy of the model shares rather than copies."""

        def wait(*_: object) -> None:
            for bucket in buckets:
                self.synchronizer.before_read(bucket)

        return wait

    def _undo_all_waits(self) -> None:
        while self._undo_waits:
            self._undo_waits.pop()()
