"""A replica that is one of several in a world: a GAN's generator, an optimizer's part of a model.

    with world.step():
        …backward()             gradients add up here; those of a model that isn't trained, too
        optimizer_d.step()      the exchange of what optimizer_d trains begins
        …backward()             flows through the discriminator as well: its gradients stay here
        optimizer_g.step()
                                what no optimizer has stepped isn't exchanged

An exchange begins where the script's calls say so: at `optimizer.step()`, or where a gradient is
used. All ranks make these calls. That a backward reaches a parameter isn't such a call: a rank
without samples runs none. Each replica has a communicator of its own, so that their collectives
need no common order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.algorithms.method import MethodBuilder
from paceline.algorithms.synchronizer import StepInfo
from paceline.errors import CommError, ConfigError
from paceline.generation.run import Run
from paceline.reduce.buckets import Bucket
from paceline.replica.buffer_broadcast import BufferBroadcast
from paceline.replica.hooks import ReplicaHooks
from paceline.replica.model_statistics import ModelStatistics
from paceline.replica.replica import Replica
from paceline.replica.trained_parameters import Scope
from paceline.update.batch_norm import BatchShare
from paceline.update.parameter_watch import Gap


class GroupedHooks(ReplicaHooks):
    """Hooks of one of several replicas: gradients add up until the optimizer steps, in all steps.

    Args:
        statistics: the model's running statistics; None: another replica has them.
        arguments: as of `ReplicaHooks`.

    Attributes:
        exchanged: whether an exchange of the step has begun before `optimizer.step()`.
    """

    def __init__(self, statistics: ModelStatistics | None, *arguments: Any) -> None:
        self._statistics = statistics
        self._rested = self.exchanged = False
        self._share = 0.0  # of the step's samples
        super().__init__(*arguments)

    def begin(self, step: StepInfo) -> None:
        """Start a step."""
        self.install_statistics()
        self.exchanged = False
        self._share = step.weight
        super().begin(step)

    def settle(self) -> None:
        """Settle, the running statistics too."""
        self.install_statistics()
        super().settle()

    def rest(self) -> None:
        """End a step in which nothing was exchanged."""
        self._running = self._reading = False
        self._rested = True
        self.gradients.guard.clear()
        self._end_kept()

    def forget_gradients(self) -> None:
        """Forget gradients that were added but not sent, and are going to be zeroed."""
        self.gradients.guard.clear()
        self.gradients.begin_again()

    def finish_tracing(self) -> None:
        """After the first step that has trained the model, use the reads that were traced."""
        if not self._rested:
            super().finish_tracing()
        self._rested = False
        if self._statistics is not None:
            self._statistics.exchange(self._share)

    def close(self, *, drain: bool = False) -> None:
        """Remove the hooks and close the synchronizer."""
        super().close(drain=drain)
        if self._statistics is not None:
            self._statistics.close()

    def install_statistics(self) -> None:
        """Install the model's running statistics, which this replica may have."""
        if self._statistics is not None:
            self._statistics.install()

    def _done_hook(self, index: int) -> Callable[[Tensor], None]:
        return self._added_hook(index)

    def _wait_before(self, module: nn.Module, buckets: tuple[Bucket, ...]) -> None:
        if buckets:  # otherwise its parameters are another replica's
            super()._wait_before(module, buckets)


class GroupedReplica(Replica):
    """Model replica that is one of several in a world.

    Args:
        model, optimizer, run, builder, share, scope, purpose, buffers: as of `Replica`.
        gradients: the purpose of the group whose collectives are where the model is.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        run: Run,
        builder: MethodBuilder,
        *,
        share: BatchShare,
        scope: Scope,
        purpose: str,
        gradients: str,
        buffers: BufferBroadcast | None = None,
    ) -> None:
        self._has_buffers = scope.first
        self._run = run
        self._gradients = gradients
        super().__init__(
            model,
            optimizer,
            run,
            builder,
            share=share,
            scope=scope,
            purpose=purpose,
            buffers=buffers if scope.first else None,
        )

    def reduce(self) -> None:
        """Wait, and make every `.grad` the mean over the global batch; as `Replica.reduce`."""
        if self.ended and self._watch.left:
            self._watch.begin(Gap.GRADIENTS)  # which a use has ended
            raise ConfigError(
                f"a gradient of {type(self._model).__name__} was used after a step in which its "
                "optimizer didn't step, so it isn't the mean over the global batch: use it inside "
                "the step's block, or zero it."
            )
        self._own_binding.exchanged = True
        super().reduce()

    def drain(self) -> None:
        """End the exchange; as `Replica.drain`."""
        with suppress(CommError):  # a peer that has gone needs nothing
            self._own_binding.install_statistics()
        super().drain()

    def _make_exchange_hooks(self, *arguments: Any) -> ReplicaHooks:
        statistics = None
        if self._has_buffers:
            statistics = ModelStatistics(self._model, self._run, self._gradients)
        return GroupedHooks(statistics, *arguments)

    @property
    def _own_binding(self) -> GroupedHooks:
        binding = self._binding
        assert isinstance(binding, GroupedHooks)
        return binding

    def _bind_anew_if_changed(self) -> None:
        """Bind anew as `Replica` does, but not while all its parameters are frozen."""
        self._watch.left = False
        if not self.frozen:
            super()._bind_anew_if_changed()

    def _end_without_update(self) -> None:
        binding = self._own_binding
        if binding.exchanged:
            super()._end_without_update()
            return
        with self._watch.paused():
            if (copier := binding.copier) is not None:
                self.settle()
                copier.end(binding.state, in_step=False)
                binding.copier = None
            binding.rest()
        self._number = None
        self._watch.left = True

    def _done(self) -> None:
        super()._done()
        self._forget_earlier_buffers()  # further forwards of the block are of the next state

    @contextmanager
    def _before_zeroing(self, set_to_none: bool) -> Iterator[None]:
        """Zero gradients that aren't exchanged yet where they are."""
        if self._hooks is not None and self._watch.gap is Gap.GRADIENTS:
            self._watch.end()
            self._own_binding.forget_gradients()
        with super()._before_zeroing(set_to_none):
            yield
