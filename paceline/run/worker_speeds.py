"""The ranks' speeds, and with `--shares measured` the shares of the global batch that follow them.

Each rank measures its own time of a step: without waits for peers, with its data. The times travel
in the step's summary, so all ranks know the same ones and decide alike (`ShareRule`):

    step m          own times ── summary
    boundary m + 2  decided; noted in the position: (m + LEAD, shares)
    step m + LEAD   begins with the new shares; no batch of it was yielded before the decision

With equal shares some steps of each generation are measured, and a line says once how the ranks
differ. A run whose exchange is chosen by measurement may measure more of them, and then propose a
server (`ServerProposal`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from paceline.data.batch_slice import BatchSlice
from paceline.data.shares import divide
from paceline.errors import Message
from paceline.generation.run import Run
from paceline.generation.summaries import StepSummary
from paceline.run.autotune.server_proposal import LEAST_MS, ServerProposal
from paceline.run.extension import Extension
from paceline.run.share_rule import ShareRule, shares_for
from paceline.snapshots.position import Position

LEAD = 3  # steps from a measured one to the first that may have other shares, where the lag is 1
UNTIMED = 3  # steps at the start of a generation, which are slower than others
FIRST = 20  # the step where the measurement with equal shares begins
COMPARED = 11  # the steps of that measurement
LEAST_DIFFERENCE = 0.1  # between two ranks' times a sample; a smaller one isn't reported


class WorkerSpeeds(Extension):
    """Speed measurement of the ranks, and the present shares of the global batch.

    Args:
        run: the run, whose recorder receives events `speeds`, and notes for the user.
        position: of the run, which holds the shares.
        measured: the shares follow the speeds; otherwise they are equal.
        usual_only: steps whose weight a script gives, or which accumulate several batches, show
            nothing of the speeds that shares follow.
        proposal: proposes a server by the measured steps; None: nothing does.

    Attributes:
        measured: whether the shares follow the speeds.
        batch_size: samples of a full global batch; 0: unknown.
        due: number of the first step that is measured.
    """

    def __init__(
        self,
        run: Run,
        position: Position,
        *,
        measured: bool,
        usual_only: bool = False,
        proposal: ServerProposal | None = None,
    ) -> None:
        self._run = run
        self._position = position
        self.measured = measured
        self._usual_only = measured and usual_only
        self._proposal = proposal
        self._compared = False  # whether a window of steps with equal shares was compared
        self.batch_size = 0
        self._rule: ShareRule | None = None
        self._named: Sequence[int] = ()  # the shares that the last line has
        self.begin_generation()

    def begin_generation(self) -> None:
        """Measure anew; keep the position's shares where there are as many ranks.

        Which steps are measured is known to all ranks from this generation alone. A rank may have
        received fewer summaries of an earlier one than another: it noticed the loss before, or was
        away.
        """
        size = self._run.context.along("data").size
        planned = self._position.shares
        if not self.measured or any(len(shares) != size for _, shares in planned):
            planned.clear()
        self._rule = None
        self.due: float = self._position.number + (UNTIMED if self.measured else FIRST)
        if size == 1:
            self.due = math.inf
        self._rows: list[Sequence[float]] = []  # with equal shares: the steps measured
        self._left = 2 * COMPARED  # with equal shares: steps that may still be measured
        if self._proposal is not None:
            self._proposal.windows.clear()  # of another world
        self.interrupt()

    def interrupt(self) -> None:
        """Don't measure the present step: what follows isn't a part of it."""
        self._began: float | None = None  # when it began, less this rank's waits before it

    def shares(self, number: int) -> Sequence[int] | None:
        """Return the shares of the global batch of a step, (ranks,); None: equal ones."""
        planned = [shares for first, shares in self._position.shares if first <= number]
        return planned[-1] if planned else None

    def present_shares(self) -> Sequence[int] | None:
        """Return those of the next step, by which an evaluation's batches are divided, too."""
        return self.shares(self._position.number)

    def row(self, batch: BatchSlice) -> Sequence[float]:
        """Return what this rank reports of a measured step: its own time in ms, (ranks,).

        It is 0 where the step shows nothing of the rank's speed: in the first one that is measured,
        in that of a short batch, and in one that isn't usual where only those count.
        """
        if batch.number < self.due:
            return ()
        own = self._run.timeline.own_seconds()
        milliseconds = [0.0] * self._run.context.along("data").size
        counts = batch.fraction is None or not self._usual_only
        if counts and self._began is not None and batch.global_count == self.batch_size:
            milliseconds[batch.rank] = max(1000 * (own - self._began), 1e-3)
        self._began = own
        return milliseconds

    def act(self, summary: StepSummary, row: Sequence[float]) -> None:
        """Decide by the ranks' times of a step."""
        if row and not self.measured:
            self._compare(summary.step, row)
        if not self.measured or not row or not all(row):
            return
        step = summary.step
        planned = self._position.shares
        while len(planned) > 1 and planned[1][0] <= self._position.number:
            del planned[0]
        if planned and step <= planned[-1][0]:
            return  # with earlier shares, or the first step with the present ones
        present = planned[-1][1] if planned else self._equal()
        self._rule = self._rule or ShareRule(present)
        if (shares := self._rule.measure(row)) is not None:
            first = self._first_after(step)
            planned.append((first, list(shares)))
            self._report_change(step, _each(row, present), first, shares)

    def _first_after(self, step: int) -> int:
        """Return the first step of which no rank has yielded a batch when `step` is decided on."""
        return step + LEAD - 1 + self._run.context.summaries.lag

    def _equal(self) -> tuple[int, ...]:
        return divide(self.batch_size, [1] * self._run.context.along("data").size)

    def _compare(self, step: int, row: Sequence[float]) -> None:
        """Report once what windows of steps with equal shares show."""
        if not self._left:
            return  # a step that began before the last one was counted
        self._left -= 1
        if all(row):
            self._rows.append(row)
        if len(self._rows) == COMPARED:
            self._left = 2 * COMPARED if self._report(step) else 0
            self._rows = []
        if not self._left:
            self.due = math.inf

    def _report(self, step: int) -> bool:
        """Report what a window of steps shows; return whether another one is to be measured."""
        if not self._compared:
            self._compared = True
            self._report_difference(step)
        if self._proposal is None:
            return False
        again = self._proposal.add(self._rows)
        if (sentence := self._proposal.sentence()) is not None:
            self._say(sentence)
            self._proposal.port_ms = None  # a later generation doesn't say it again
        return again

    def _report_difference(self, step: int) -> None:
        """Report which rank is slow, and what shares by measured speed would save."""
        present = self._equal()
        each = _each([median(column) for column in zip(*self._rows, strict=True)], present)
        clear = self._differ_clearly(present)
        first = self._first_after(step)
        slowest = self._record(step, each, first, present, clear=clear)
        if slowest is None:
            return
        now, then = (
            max(ms * n for ms, n in zip(each, shares, strict=True))
            for shares in (present, shares_for(self.batch_size, each))
        )
        if now < LEAST_MS:
            return
        gain = f"the slowest would compute for {_ms(then)} ms a step instead of {_ms(now)} ms"
        self._say(
            Message(
                "workers differ in speed: {} needs {} ms a sample, and the fastest {} ms. With "
                f"{{--shares}} measured, {gain}.",
                self._describe(slowest),
                _ms(each[slowest]),
                _ms(min(each)),
            )
        )

    def _differ_clearly(self, shares: Sequence[int]) -> bool:
        """Return whether one rank was slower than another in nearly all of the measured steps."""
        columns: list[list[float]] = [
            sorted(c) for c in zip(*(_each(row, shares) for row in self._rows), strict=True)
        ]
        slow = max(column[1] for column in columns)
        fast = min(column[-2] for column in columns)
        return slow > (1 + LEAST_DIFFERENCE) * fast

    def _report_change(
        self, step: int, each: Sequence[float], first: int, shares: Sequence[int]
    ) -> None:
        """Record new shares; a line has those that differ much from the last line's."""
        slowest = self._record(step, each, first, shares)
        pairs = zip(shares, self._named or self._equal(), strict=True)
        if all(abs(new - old) <= LEAST_DIFFERENCE * max(new, old) for new, old in pairs):
            return
        self._named = shares
        listed = ", ".join(map(str, shares[:8])) + (", …" if len(shares) > 8 else "")
        why = "all are equally fast"
        if slowest is not None:
            own = f"{_ms(each[slowest])} ms a sample"
            why = f"{self._describe(slowest)} needs {own}, and the fastest {_ms(min(each))} ms"
        counts = f"{listed} of {self.batch_size:,} samples from step {first + 1} on"
        self._say(Message("shares: {}; {}.", counts, why))

    def _record(
        self,
        step: int,
        each: Sequence[float],
        first: int,
        shares: Sequence[int],
        *,
        clear: bool = True,
    ) -> int | None:
        """Record the times a sample; return the slowest rank, if it is much slower than another."""
        slowest = max(range(len(each)), key=each.__getitem__)
        differ = clear and each[slowest] > (1 + LEAST_DIFFERENCE) * min(each)
        self._run.recorder.event(
            "speeds",
            generation=self._run.context.world.generation.number,
            step=step,
            milliseconds=[round(ms, 4) for ms in each],
            slowest=slowest if differ else None,
            first=first,
            shares=list(shares),
        )
        return slowest if differ else None

    def _describe(self, rank: int) -> str:
        context = self._run.context
        return context.world.generation.describe(context.along("data").ranks[rank])

    def _say(self, note: Message) -> None:
        if self._run.leads:
            self._run.note(note)


def _each(times: Sequence[float], shares: Sequence[int]) -> list[float]:
    """Return the ranks' times a sample; a rank without samples computes a placeholder."""
    return [time / max(1, share) for time, share in zip(times, shares, strict=True)]


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:,.0f}"
