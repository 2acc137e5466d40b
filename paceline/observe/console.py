"""Console output of a run: the leader's progress on a terminal, or lines in a pipe.

    Training resnet20: 2 workers on 1 machine (cpu), 50,000 images, 391 steps per epoch, 30 epochs.
    epoch 2/30  ━━━━━━───────  180/391  21:07 left  1,204 images/s  loss 1.219  accuracy 56.1%  …
    epoch 1/30: 1,198 images/s, loss 1.713, accuracy 36.9%, test accuracy 41.0%, …

Something is shown some times a second on a terminal, and every ten seconds in a pipe. Epochs and
steps count from 0 in events and from 1 for people. A machine without the leader shows a line an
epoch:

    Training on machine 1 (resnet20, 30 epochs); machine 0 shows the steps.
    epoch 1/30: loss 1.713, accuracy 36.9%, test accuracy 41.00%
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.text import Text

from paceline.errors import many
from paceline.observe.cost.cost import Cost
from paceline.observe.csv_log import CsvLog
from paceline.observe.last_state import best_sentence
from paceline.observe.model_card import CARD_NAME
from paceline.observe.progress_rate import ProgressRate, duration
from paceline.observe.score_counter import BATCH_SUMS
from paceline.observe.terminal import Terminal
from paceline.recorder import NullRecorder

LIVE_INTERVAL = 0.2  # seconds between looks, on a terminal
PIPE_INTERVAL = 10.0  # and in a pipe
_SHOWN_WAIT = 0.01  # share of the time that steps waited for input; less isn't shown
BAR_WIDTH = 24  # columns, where there is room


class Console(NullRecorder):
    """Recorder that shows the progress of a run on a terminal or in a pipe.

    Events, and the fields that it reads:
        run: model, world_size, machines, device, samples (per epoch), steps (per epoch), epochs,
            labels (their number), continued (true for a later generation of the start, whose
            members a line of its own has told).
        step: epoch, epoch_step, step, steps (per epoch), samples, learning_rate, sums (of the epoch
            so far, in the form that the score counter returns), exposed_ms (how long the rank
            waited for the exchange, if measured), wait_input_ms (how long it waited for its
            batch), staleness (the mean of its reads, where parameters may be behind).
        evaluate: step, steps.
        epoch: epoch, seconds, samples, loss, accuracy, learning_rate, test_accuracy and top5 (None
            without test data), wait_input (share of the time that steps waited for batches),
            staleness (how often parameters were read that were 0, 1, … versions behind),
            straggler (rank, seconds, share, stage: what `run/straggler.py` has found, or None).
        speeds: milliseconds (a sample, by rank), slowest (a rank, or None).
        note: text.
        cost: the fields of `Cost`; the last ones are shown at the end.
        end: best (the best test accuracy, or None), best_epoch, weights (paths of the files).

    Args:
        file: output stream; by default, standard output.
        terminal: whether `file` is a terminal; None: detected.
        width: number of columns of the terminal; None: detected.
        log: the CSV log. Its path is shown. The line of an epoch that it has a row of isn't shown:
            an earlier leader, or this one before the run went back, has shown it.
        started: when the start of the run began, by the clock, where a later leader opens this;
            None: now.
        clock: returns seconds since an arbitrary origin.
    """

    def __init__(
        self,
        file: TextIO | None = None,
        *,
        terminal: bool | None = None,
        width: int | None = None,
        log: CsvLog | None = None,
        started: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminal = Terminal(file or sys.stdout, terminal=terminal, width=width)
        self._interval = LIVE_INTERVAL if self._terminal.live else PIPE_INTERVAL
        self._log = log
        self._clock = clock
        self._shown = clock()
        self._started = self._shown if started is None else started
        self._rate = ProgressRate(self._shown)
        self._epochs = 0
        self._world_size = 1
        self._labels = sys.maxsize
        self._exposed: list[float] = []  # ms, of the steps since the last look
        self._stale: list[float] = []  # mean staleness, likewise
        self._waited_input = 0.0  # ms, likewise
        self._slowest = ""  # the rank that is slower than others
        self._samples = 0  # seen since the epoch's start; a resumed one has others before
        self._per_epoch = 0
        self._cost: Cost | None = None

    def event(self, name: str, **fields: Any) -> None:
        """Show what happened, or take note of it for the next look."""
        show: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "run": self._run,
            "step": self._step,
            "evaluate": self._evaluate,
            "epoch": self._epoch,
            "speeds": self._speeds,
            "cost": self._keep_cost,
            "note": lambda fields: self._terminal.line(fields["text"]),
            "end": self._end,
        }
        if name in show:
            show[name](fields)

    def close(self) -> None:
        """Leave the terminal at the start of a line."""
        self._terminal.close()

    def _run(self, fields: Mapping[str, Any]) -> None:
        self._shown = self._clock()
        self._samples = 0
        self._per_epoch = fields["samples"]
        self._rate = ProgressRate(self._shown)
        self._epochs = fields["epochs"]
        self._world_size = fields["world_size"]
        self._labels = fields.get("labels", sys.maxsize)
        if fields.get("continued"):
            return
        self._started = self._shown
        workers = many(fields["world_size"], "worker")
        if "stages" in fields:
            workers = (
                f"{many(fields['world_size'], 'replica')} of {many(fields['stages'], 'stage')}"
            )
        self._terminal.line(
            f"Training {fields['model']}: {workers} on "
            f"{many(fields['machines'], 'machine')} ({fields['device']}), "
            f"{many(fields['samples'], 'image')} and {many(fields['steps'], 'step')} per epoch, "
            f"{many(fields['epochs'], 'epoch')}."
        )
        if self._log is not None:
            self._terminal.line(f"Log: {self._log.path}")

    def _step(self, fields: Mapping[str, Any]) -> None:
        now = self._clock()
        self._rate.step(fields["samples"], now)
        self._samples += fields["samples"]
        if self._world_size > 1 and "exposed_ms" in fields:
            self._exposed.append(fields["exposed_ms"])
        if "staleness" in fields:
            self._stale.append(fields["staleness"])
        self._waited_input += fields.get("wait_input_ms", 0.0)
        if now - self._shown < self._interval:
            return
        waiting = self._waited_input / (1000 * (now - self._shown))
        self._waited_input = 0.0
        self._shown = now
        left = self._rate.seconds_left(self._epochs * fields["steps"] - fields["step"] - 1, now)
        loss, right, _, samples = fields["sums"][:BATCH_SUMS]
        parts = [  # what matters most first
            *([] if left is None else [f"{duration(left)} left"]),
            f"{self._rate.samples_per_second(now):,.0f} images/s",
            *([f"loss {loss / samples:.3f}", f"accuracy {right / samples:.1%}"] if samples else []),
            f"lr {fields['learning_rate']:.4g}",
        ]
        if self._exposed:
            parts.append(f"{sum(self._exposed) / len(self._exposed):,.1f} ms exposed")
            self._exposed.clear()
        if self._stale:
            parts.append(f"staleness {sum(self._stale) / len(self._stale):.1f}")
            self._stale.clear()
        parts += _input_part(waiting)
        parts += [self._slowest] if self._slowest else []
        done = fields["epoch_step"] + 1
        steps = fields["steps"]
        self._show(f"epoch {fields['epoch'] + 1}/{self._epochs}", done, steps, parts)

    def _speeds(self, fields: Mapping[str, Any]) -> None:
        rank = fields["slowest"]
        each = fields["milliseconds"]
        self._slowest = "" if rank is None else f"rank {rank} {each[rank] / min(each):.1f}x as slow"

    def _evaluate(self, fields: Mapping[str, Any]) -> None:
        now = self._clock()
        if now - self._shown >= self._interval:
            self._shown = now
            self._show("evaluation", fields["step"] + 1, fields["steps"], [])

    def _epoch(self, fields: Mapping[str, Any]) -> None:
        self._shown = self._clock()
        self._rate.pause(self._shown)
        seen = self._samples
        self._samples = 0  # in this start of the run
        if self._log is not None and fields["epoch"] <= self._log.recorded:
            return
        parts = [  # without its speed where a lost leader has seen all of the epoch
            *([f"{seen / fields['seconds']:,.0f} images/s"] if seen else []),
            *_score_parts(fields, self._labels),
        ]
        parts += _input_part(fields.get("wait_input", 0.0))
        parts += _straggler_part(fields.get("straggler"))
        parts += _staleness_part(fields.get("staleness", ()))
        if (skipped := self._per_epoch - fields["samples"]) > 0:  # of all ranks
            parts.append(f"{many(skipped, 'bad record')} skipped")
        parts += [f"lr {fields['learning_rate']:.4g}", duration(fields["seconds"])]
        text = f"epoch {fields['epoch'] + 1}/{self._epochs}: {', '.join(parts)}"
        self._terminal.line(text, style="bold")

    def _keep_cost(self, fields: Mapping[str, Any]) -> None:
        self._cost = Cost.of_event(fields)

    def _end(self, fields: Mapping[str, Any]) -> None:
        took = f"Finished after {duration(self._clock() - self._started)}"
        best = best_sentence(fields.get("best"), fields.get("best_epoch"))
        self._terminal.line(f"{took}; {best}." if best else f"{took}.")
        if self._cost is not None:
            self._terminal.line(f"Cost: {', '.join(self._cost.texts)}.")
        if fields.get("weights"):
            self._terminal.line(f"Weights: {', '.join(fields['weights'])}")
            folder = Path(fields["weights"][0]).parent
            self._terminal.line(f"Model card: {folder / CARD_NAME}")
            run = shlex.quote(str(folder))
            self._terminal.line(f"Classify images: paceline predict {run} IMAGE …")
            more = ", ".join(f"paceline {name} {run}" for name in ("evaluate", "export", "plot"))
            self._terminal.line(f"More: {more}, paceline compare {run} OTHER")

    def _show(self, what: str, done: int, steps: int, parts: list[str]) -> None:
        if not self._terminal.live:
            self._terminal.status(Text(", ".join([f"{what}, step {done}/{steps}", *parts])))
            return
        rest = "  ".join([f"{done}/{steps}", *parts])
        room = self._terminal.columns - len(f"{what}    {rest}")
        width = max(0, min(room, BAR_WIDTH))
        full, empty = "#-" if self._terminal.ascii_only else "━─"
        filled = width * done // steps
        progress = Text.assemble((full * filled, "green"), (empty * (width - filled), "dim"))
        self._terminal.status(Text.assemble((what, "bold"), "  ", progress, "  ", rest))


def _input_part(share: float) -> list[str]:
    """Show the share of the time that steps waited for batches, where it is worth a look."""
    return [f"input waits {share:.0%}"] if share >= _SHOWN_WAIT else []


def _staleness_part(counts: Sequence[int]) -> list[str]:
    """Show which share of the reads was how many versions behind, where any may be."""
    reads = sum(counts)
    shares = [f"{behind}: {count / reads:.0%}" for behind, count in enumerate(counts) if count]
    return [f"staleness {', '.join(shares)}"] if shares else []


def _straggler_part(straggler: tuple[int, float, float, int | None] | None) -> list[str]:
    """Show which rank or stage held others back, if one did."""
    if straggler is None:
        return []
    rank, seconds, share, stage = straggler
    name = f"rank {rank}" if stage is None else f"stage {stage}"
    return [f"{name} held others back for {seconds:.3g} s ({share:.0%})"]


class MachineConsole(NullRecorder):
    """Recorder that shows the progress of a run on a machine without the leader, in short form.

    Events, and the fields that it reads: `run`, `epoch` and `end`, as `Console`.

    Args:
        machine: this machine's number.
        leader: the number of the leader's machine.
        file: output stream; by default, standard output.
        terminal: whether `file` is a terminal; None: detected.
    """

    def __init__(
        self,
        machine: int,
        leader: int,
        file: TextIO | None = None,
        *,
        terminal: bool | None = None,
    ) -> None:
        self._machine = machine
        self._leader = leader
        self._terminal = Terminal(file or sys.stdout, terminal=terminal)
        self._epochs = 0
        self._labels = sys.maxsize

    def event(self, name: str, **fields: Any) -> None:
        """Show an epoch's results, or the start or the end of the run."""
        if name == "run":
            self._epochs = fields["epochs"]
            self._labels = fields.get("labels", sys.maxsize)
            self._terminal.line(
                f"Training on machine {self._machine} ({fields['model']}, "
                f"{many(fields['epochs'], 'epoch')}); machine {self._leader} shows the steps."
            )
        elif name == "epoch":
            parts = ", ".join(_score_parts(fields, self._labels))
            self._terminal.line(f"epoch {fields['epoch'] + 1}/{self._epochs}: {parts}")
        elif name == "end":
            self._terminal.line("Finished.")

    def close(self) -> None:
        """Leave the terminal at the start of a line."""
        self._terminal.close()


def _score_parts(fields: Mapping[str, Any], labels: int) -> list[str]:
    """Show an epoch's loss and accuracies."""
    parts = [f"loss {fields['loss']:.3f}", f"accuracy {fields['accuracy']:.1%}"]
    if fields["test_accuracy"] is not None:
        parts.append(f"test accuracy {fields['test_accuracy']:.2%}")
    if fields.get("top5") is not None and labels > 5:  # otherwise it is 100%
        parts.append(f"top-5 {fields['top5']:.2%}")
    return parts
