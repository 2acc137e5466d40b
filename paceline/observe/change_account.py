"""Account of a change of the generation: what each part of it took on this member.

    a peer is lost │ detect │ interrupt │ decide │ restore │ form │ resume │ replay │
                            ▲           ▲        ▲                         ▲        ▲
                       detected   this thread    the next         first step        the step that
                                  waits          generation       begins            was lost begins

*interrupt* is the time until the training thread waits for the decision: it can't leave a kernel of
torch's. *decide* is that wait; the vote itself begins at the detection. *form* connects the next
generation, and divides again what was divided among the ranks. *resume* is the time to the first
step, for the data loader, say. When the peer was lost isn't known here, so *detect* isn't either.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.timeline.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class ChangeTimes:
    """Times of a change, in seconds.

    Attributes:
        detected_at: when this member detected the loss, by the machine's monotonic clock.
        interrupt: from then until the training thread waited for the decision.
        decide: that wait.
        restore: the restoration of the snapshot.
        form: the connections of the next generation, and the division of the state among its ranks.
        steps: the number of steps that are trained again.
        interval: the interval between snapshots, in steps; 0: it wasn't measured yet.
    """

    detected_at: float
    interrupt: float
    decide: float
    restore: float
    form: float
    steps: int
    interval: int


@dataclass(frozen=True, kw_only=True)
class ReplayTimes:
    """Times after a change, in seconds.

    Attributes:
        steps: the number of steps that were trained again.
        resume: from the generation's entry to its first step.
        replay: from there to the beginning of the step in which the peer was lost.
    """

    steps: int
    resume: float
    replay: float


class ChangeAccount:
    """Account of one change after another, of the training thread.

    Args:
        timeline: has the machine's monotonic clock.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._noticed = self._left = self._decided = self._restored = self._entered = 0.0
        self._began: float | None = None  # the first step
        self._first = self._lost = self._interval = 0  # steps
        self._replaying = False

    def lose(self, step: int) -> None:
        """Note that the training thread has the error of a lost peer, in a step."""
        self._noticed = self._timeline.now()
        # A loss in a replay comes before the step that is
        # still to be made good, which stays the lost one.
        self._lost = max(step, self._lost)
        self._replaying = False

    def leave(self) -> None:
        """Note that the training thread waits for the decision from now on."""
        self._left = self._timeline.now()

    def decide(self, detected_at: float | None) -> None:
        """Note that the next generation is known.

        Args:
            detected_at: when another thread of this process detected the loss; None: none did.
        """
        self._decided = self._timeline.now()
        if detected_at is not None:
            self._noticed = min(self._noticed, detected_at)

    def restore(self, step: int, interval: int) -> None:
        """Note that the snapshot before a step is restored; the next one is an interval later."""
        self._restored = self._timeline.now()
        self._first = step
        self._interval = interval

    def enter(self) -> ChangeTimes:
        """Note that the next generation is entered; return what it took."""
        self._entered = self._timeline.now()
        self._began = None
        self._replaying = True
        return ChangeTimes(
            detected_at=self._noticed,
            interrupt=self._left - self._noticed,
            decide=self._decided - self._left,
            restore=self._restored - self._decided,
            form=self._entered - self._restored,
            steps=self._lost - self._first,
            interval=self._interval,
        )

    def begin_step(self, step: int) -> ReplayTimes | None:
        """Note that a step begins; return what followed a change, if it is the lost step."""
        if not self._replaying:
            return None
        now = self._timeline.now()
        if self._began is None:
            self._began = now
        if step < self._lost:
            return None
        steps = self._lost - self._first
        self._lost = 0
        self._replaying = False
        resume = self._began - self._entered
        replay = now - self._began
        return ReplayTimes(steps=steps, resume=resume, replay=replay)
