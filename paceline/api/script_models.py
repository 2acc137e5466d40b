"""Models of a script: what its `parallelize` and `track` calls give, and the begin of its steps.

parallelize     restored, and bound with those of earlier calls
track           restored
the first step  nothing of the checkpoint is left; the run's start is recorded
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.api.pairs import refuse_missing
from paceline.api.sample_position import SamplePosition
from paceline.api.tracked import TRACKED, Tracked, refuse_foreign
from paceline.cluster.supervision.worker import reporting_lost_supervisor
from paceline.comm.communicator import broadcast_state
from paceline.data.drawn_order import DrawnOrder
from paceline.replica.group import AnyReplica
from paceline.run.first_step_checks import FirstStepChecks
from paceline.session.session import Session
from paceline.session.training import Training
from paceline.state.stateful import Restorable
from paceline.wiring.pairs import Pair


class ScriptModels:
    """Models of a script, with their optimizers and what else is tracked.

    Args:
        session: makes the steps.
        position: the run's position.

    Attributes:
        pairs: each model with one of its optimizers, in the order of the calls.
        tracked: what the script tracks besides.
        replica: the model's replica, or those of several as one; None: there is no model yet.
        models: the models, or lists of models, of all calls.
        begun: whether this process has begun its first step.
        in_step: whether a step is active.
        failed: whether an error ended the last step.
    """

    def __init__(self, session: Session, position: SamplePosition) -> None:
        self._session = session
        self._position = position
        session.start.given.tracked_entry = TRACKED
        session.start.restore({"course": position})
        self.pairs: list[Pair] = []
        self.tracked = Tracked(session)
        self.replica: AnyReplica | None = None
        self.models: Sequence[nn.Module] = ()
        self.begun = False
        self.in_step = False
        self.failed = False
        self._checks: Sequence[FirstStepChecks] = ()  # of the pairs together

    def restore(self, pair: Pair) -> None:
        """Restore a pair from the checkpoint, and give all ranks rank 0's optimizer state."""
        session = self._session
        model, optimizer = pair.entries
        objects: dict[str, Restorable] = {model: pair.model} if pair.scope.first else {}
        objects[optimizer] = pair.optimizer
        session.start.given.add_optimizer(optimizer, pair.optimizer, pair.model)
        session.start.restore(objects)
        # Schedules that were tracked before their optimizer was known: its rate may be edited.
        self.tracked.restore_schedules_of(pair.optimizer)
        communicator = session.run.context.group("data", "steps")
        own = None
        if communicator.rank == 0 and pair.optimizer.state:
            own = pair.optimizer.state_dict()
        state = broadcast_state(communicator, own, "the broadcast of rank 0's optimizer state")
        if state is not None and communicator.rank > 0:
            pair.optimizer.load_state_dict(state)
        if session.folder is not None:
            for name, saved in objects.items():
                refuse_foreign(f"{name}.state_dict()", saved.state_dict())

    def restore_optimizers(self) -> None:
        """Restore the optimizers' states again, after a new schedule has reset their rates."""
        session = self._session
        session.start.restore({pair.entries[1]: pair.optimizer for pair in self.pairs})
        if self.replica is not None and self.replica.rounds is not None:
            workers = session.run.context.along("data")
            session.start.restore_optimizer(self.pairs[0].optimizer, workers)

    def bind(self, pairs: Sequence[Pair]) -> Training:
        """Make steps of further pairs, and of those of earlier calls with them; collective."""
        session = self._session
        everything = [*self.pairs, *pairs]
        replicas = session.replicate(everything)
        self.pairs = everything
        training = Training(
            pairs=everything,
            replicas=replicas,
            tracked=self.tracked.objects,
            tracked_entry=TRACKED,
            saved={"course": self._position},
            within_epoch=True,
        )
        self.replica = training.replica
        self.models = [pair.model for pair in everything if pair.scope.first]
        self._position.several = len(replicas) > 1
        config = everything[0].config
        self._position.must_divide = config.shares == "measured"
        speeds = session.worker_speeds(config)
        self._checks = self._first_step_checks(training)
        session.bind(training, speeds, extensions=self._checks)
        return training

    def discard_batches(self) -> None:
        """Discard what batches have left in model and optimizer that no step has trained."""
        if self.replica is not None and (self.failed or self._position.waiting):
            self.replica.discard_batches()

    def begin(self) -> None:
        """Begin this start's first step."""
        session = self._session
        run = session.run
        order = self._position.order
        assert session.steps is not None
        assert self.replica is not None
        self.tracked.require_all()
        refuse_missing(self.pairs, session.start.state)
        for note in session.start.given.notes(session.start.state or {}):
            run.note(note, shown=run.leads)
        if session.speeds is not None and order is not None:
            session.speeds.batch_size = order.batch_size
        for checks in self._checks:
            checks.divided = order is not None
        for scaler in self.tracked.scalers:
            self.replica.use_loss_scale(scaler)
        session.record_start(
            samples=order and order.samples,
            steps=order and order.steps,
            epochs=None,  # only the script has this number
            batch=order and order.batch_size,
            model=", ".join(pair.name for pair in self.pairs if pair.scope.first),
            device=session.device.type,
            **({"drawn": True} if isinstance(order, DrawnOrder) else {}),
        )
        if order is not None and session.steps.recovery.survives:
            session.begin()
            session.resources.enter_context(reporting_lost_supervisor(session.folder))
        self.begun = True

    def _first_step_checks(self, training: Training) -> Sequence[FirstStepChecks]:
        session = self._session
        mesh = session.run.context.mesh
        if mesh.divided or mesh.lengths["data"] == 1:  # a stage knows no batch, or no loss
            return []
        checks = FirstStepChecks(
            session.run,
            list(dict.fromkeys(pair.model for pair in training.pairs)),
            gpu=session.device.type == "cuda",
            averaged=training.replica.rounds is not None,
        )
        session.bound.callback(checks.close)
        return [checks]
