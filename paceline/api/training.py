"""What goes on in a world: its one model's steps, from `parallelize` to the last one.

    bind ── begin_epoch ── step … step ── end_steps ── begin_epoch …  ── finish
            └ saves what was done since the last epoch's steps

An epoch ends when the next one begins: what a script does between (a scheduler's step, an
evaluation) belongs to the epoch, and is made again if the run is stopped in the middle of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.api.argument_names import in_python
from paceline.api.run_events import RunEvents
from paceline.api.sample_position import SamplePosition
from paceline.api.session import Session
from paceline.api.tracked import Trackable, Tracked
from paceline.data.batch_slice import BatchSlice
from paceline.data.order import Order
from paceline.errors import ConfigError
from paceline.replica.replica import Replica
from paceline.run.step_summary import StepSummaries
from paceline.run.steps import Steps, Stop
from paceline.wiring import Start

_TERMINATED = 143  # another process was


class Training:
    """A world's training.

    Args:
        session: the process's part in the run.
        start: where it goes on.

    Attributes:
        start: the same, without the checkpoint from the first step on.
        position: which samples steps train.
        tracked: what checkpoints keep besides.
        closed: the world is closed.
    """

    def __init__(self, session: Session, start: Start) -> None:
        self.session, self.start = session, start
        kept = None if start.state is None else start.state.get("tracked", {})
        self.tracked = Tracked(kept)
        self.position = SamplePosition(start.position, session.communicator, session.link.device)
        start.restore({"course": self.position})
        self.closed = False
        self._begun = False  # the first step was, in this process
        self._optimizer: Optimizer | None = None
        self._events = RunEvents(
            session.recorder, session.link.joined.members, start, session.link.device.type
        )
        self._steps: Steps | None = None
        self._replica: Replica | None = None
        self._loaders = 0
        self._inside = False  # a step runs
        self._broken = False  # a step was left in its middle

    @property
    def bound(self) -> bool:
        """Whether there is a model."""
        return self._replica is not None

    @property
    def exchanging(self) -> bool:
        """Whether a step runs whose gradients may be under way."""
        return self._inside and self._replica is not None and not self._replica.ended

    def bind(
        self, replica: Replica, model: nn.Module, optimizer: Optimizer, parts: Mapping[str, Any]
    ) -> None:
        """Make steps of a model from now on.

        Args:
            replica: exchanges its gradients.
            model: what the event file calls the model.
            optimizer: gets its rates back after a scheduler was made.
            parts: what checkpoints keep, by name.
        """
        session = self.session
        self._events.model = type(model).__name__
        kept = {**parts, "course": self.position, "tracked": self.tracked}
        self._replica, self._optimizer = replica, optimizer
        self._steps = Steps(
            replica,
            StepSummaries(session.communicator),
            session.recorder,
            session.checkpointer(kept),
            rank=session.communicator.rank,
            generation=self.start.generation,
            seed=session.identity["seed"],
            position=self.position.position,
            policy=session.policy,
            stopping=lambda: session.signals.status != 0,
            listen=lambda number, sums: None,
            values=0,
            device=session.link.device,
        )

    def track(self, objects: tuple[Trackable, ...], named: Mapping[str, Trackable]) -> None:
        """Track objects; see `World.track`.

        Whoever makes a scheduler, perhaps just now, sets the optimizer's rates to those of a
        beginning: the optimizer gets its own back again.
        """
        if self._begun:
            raise ConfigError(
                "world.track() was called after the first step: call it before, so that a resumed "
                "run gets the state back in time."
            )
        self.tracked.add({**self.tracked.unnamed(objects), **named})
        if self._optimizer is not None:
            with in_python():
                self.start.restore({"optimizer": self._optimizer})

    def follow(self, order: Order, *, train: bool) -> None:
        """Admit a loader; collective.

        Raises:
            ConfigError: the ranks' loaders differ, or this one doesn't fit the run.
        """
        self._loaders += 1
        facts = {
            "the data set's length": order.size,
            "batch_size": order.batch_size,
            "seed of the loader": order.seed,
            "shuffle": order.shuffle,
            "train": train,
        }
        self.session.link.agree(f"loader {self._loaders}", facts)
        if train:
            self.position.follow(order)

    def replica(self, what: str) -> Replica:
        """Return what exchanges gradients, for the caller `what`.

        Raises:
            ConfigError: there is no model yet, or the world is closed.
        """
        self.require_open(what)
        if self._replica is None:
            raise ConfigError(
                f"{what} was called before paceline.parallelize(model, optimizer, world): call "
                "that first."
            )
        return self._replica

    def require_open(self, what: str) -> None:
        """Look whether the world stands.

        Raises:
            ConfigError: it is closed.
        """
        if self.closed:
            raise ConfigError(f"{what} was used after world.close(): join again.")

    @contextmanager
    def step(self, samples: int | None) -> Iterator[None]:
        """Make a step; see `World.step`."""
        steps = self._between_steps("world.step()")
        with self._leaving():
            place, earlier = self.position.take(samples)
            self._begin()
            self._inside = self._broken = True
            try:
                with steps.step(place):
                    yield
            finally:
                self._inside = False
            self._broken = False
            for share in earlier:
                self._events.trained(share)
            self.position.trained()

    def save(self) -> None:
        """Save a checkpoint in the background; see `World.checkpoint`."""
        with in_python():
            self._between_steps("world.checkpoint()").save()

    def begin_epoch(self) -> tuple[int, int]:
        """End the epoch of the loader's last iteration; return the next one, and where in it."""
        self.require_open("the loader")
        self.position.drop()
        if self.position.next_is_another and self._steps is not None:
            with in_python():
                self._steps.end_epoch()
        self.position.begun = self.position.iterating = True
        return self.position.position.epoch, self.position.position.step

    def hand_out(self, place: BatchSlice) -> None:
        """Let the next step train a share, of which more may come before it."""
        self.position.hand_out(place)
        if self._steps is not None:
            self._steps.seed(place.number)

    def end_steps(self) -> None:
        """End an epoch's steps; stop here if somebody was asked to."""
        self.position.require_all_trained()
        if self._steps is not None:
            with self._leaving():
                self._steps.end_steps()

    def finish(self) -> None:
        """Save the state after the last step, unless there is none or it is broken."""
        if self._steps is None or self._broken or not self.position.begun:
            return
        with in_python():
            if self.position.at_end:
                self._steps.end_epoch()
            else:
                self._steps.save()
            self._steps.finish()

    def drain(self) -> None:
        """Return once the peers need nothing more of this rank's last step."""
        if self._replica is not None:
            self._replica.drain()

    def rescue(self) -> None:
        """Write the newest state in memory to the disk, from any thread."""
        if self._steps is not None:
            self._steps.rescue()

    def _between_steps(self, what: str) -> Steps:
        self.replica(what)
        assert self._steps is not None
        if self._inside:
            raise ConfigError(f"{what} was called inside of a step: call it outside.")
        if self._broken:
            raise ConfigError(
                f"{what} was called after a step that an error left in its middle: close() the "
                "world and join again; with a run, it goes on from the last checkpoint."
            )
        return self._steps

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Let the end of the run be the end of the script."""
        try:
            with in_python():
                yield
        except Stop:
            self._broken = True  # what is to be saved is
            self.session.tell_saved()
            raise SystemExit(self.session.signals.status or _TERMINATED) from None

    def _begin(self) -> None:
        """Begin this start's first step."""
        if self._begun:
            return
        self.tracked.begin()
        assert self._replica is not None
        for scaler in self.tracked.scalers:
            self._replica.follow(scaler.get_scale)
        self._events.begin(self.position.order, self.position.position.number)
        self._begun, self.start = True, replace(self.start, state=None)
