"""Proposal of a parameter server, by the workers' own times of steps: `--sync auto` prints it.

In an exact exchange each step waits for its slowest worker. With staleness K a worker waits only
where another is more than K steps behind. So a server gains where workers are slow in turn. It
gains nothing where they are even, or where one is always slow: that one needs a smaller share.

    times, end   (steps, workers) a step's own ms, without waits for other workers; when it ends
    end[t, r]    max(end[t-1, r], max over q of end[t-1-K, q]) + times[t, r]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, harmonic_mean

from paceline.errors import Message

WINDOWS = 2  # of measured steps; each must show the gain
STALENESS = 2
LEAST_GAIN = 1.1  # times as fast; a smaller gain isn't proposed
LEAST_MS = 20.0  # of a step; in shorter ones the noise of a shared machine looks like a difference

Times = Sequence[Sequence[float]]
"""(steps, workers) milliseconds of a step with equal shares, above 0."""


def propose_server(times: Times, port_ms: float = 0.0) -> Message | None:
    """Return a sentence with what a server would gain; None: too little.

    Args:
        times: those of the measured steps.
        port_ms: for which the bytes of a step occupy the port of a server.
    """
    means = [fmean(column) for column in zip(*times, strict=True)]
    each = harmonic_mean(means)
    shared = [[ms * each / mean for ms, mean in zip(row, means, strict=True)] for row in times]
    now = mean_step(times, staleness=0)
    exact = min(now, mean_step(shared, staleness=0))
    options = ((times, ""), (shared, " {--shares} measured"))
    served = {
        flags: max(port_ms, mean_step(of_shares, staleness=STALENESS))
        for of_shares, flags in options
    }
    # Equal shares, unless others gain as much again: one worker is slower besides.
    flags = min(served, key=lambda flags: served[flags] * (LEAST_GAIN if flags else 1))
    if now < LEAST_MS or exact < LEAST_GAIN * served[flags]:
        return None
    return Message(
        "exchange: workers take turns to be slow (the slowest of a step needs {:.0f} ms on "
        f"average, and each {{:.0f}} ms): {{--sync}} server {{--staleness}} {STALENESS}{flags} "
        "would train about {:.1f} times as fast. {--num_servers} 1 starts one. The result "
        "would then depend on the workers' speeds.",
        *(now, fmean(means), now / served[flags]),
    )


def mean_step(times: Times, *, staleness: int) -> float:
    """Return the mean duration of a step in which workers wait by a bound of staleness."""
    ends = [[0.0] * len(times[0])]
    for step, row in enumerate(times):
        bound = max(ends[max(0, step - staleness)])
        ends.append([max(end, bound) + ms for end, ms in zip(ends[-1], row, strict=True)])
    return max(ends[-1]) / len(times)


@dataclass(kw_only=True, eq=False)
class ServerProposal:
    """Proposal of a server, made once several windows of measured steps show its gain.

    Attributes:
        port_ms: for which the bytes of a step would occupy the port of a server; None: unknown, or
            the run has what stale workers can't have, and nothing is proposed.
        windows: the measured ones, all of the same workers.
    """

    port_ms: float | None = None
    windows: list[Times] = field(default_factory=list)

    def add(self, times: Times) -> bool:
        """Add a window; return whether another one must confirm it, the same on all ranks."""
        self.windows.append(times)
        return len(self.windows) < WINDOWS and propose_server(times) is not None

    def sentence(self) -> Message | None:
        """Return the sentence of all windows together, if each of them shows the gain."""
        if self.port_ms is None or len(self.windows) < WINDOWS:
            return None
        if any(propose_server(times, self.port_ms) is None for times in self.windows):
            return None
        return propose_server([row for times in self.windows for row in times], self.port_ms)
