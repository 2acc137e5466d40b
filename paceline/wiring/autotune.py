"""`--sync auto`: which exchange a run takes, and one line that says why.

    a world of one rank     nothing travels: allreduce
    measured before         what `exchange.toml` says, as long as the world is the same
    a short run             allreduce: it needs no time to begin, and measuring would be too much
    any other               trials in its own first steps (`run/autotune_trials.py`); where its
                            length is unknown, once it has run for a while

All candidates with float32 on their way are equal up to the order of summation, so a run may change
from one to another; what is lossy is always asked for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.cluster.membership.members import Members
from paceline.comm.communicator import Communicator, broadcast_bytes, total
from paceline.config.world import SyncConfig
from paceline.errors import Message
from paceline.reduce.buckets import partition
from paceline.replica.trained_parameters import TrainedParameters
from paceline.run.autotune_trials import Outcome, Trials, steps_of_trials
from paceline.state.exchange_choice import CHOICE_NAME, Choice, read_choice, write_choice

# Of those that are equally fast the first is taken.
CANDIDATES = {
    "cpu": (
        *(("notified", 16.0), ("allreduce", 8.0), ("notified", 8.0), ("notified", 4.0)),
        ("allreduce", 25.0),
    ),
    "cuda": (("allreduce", 8.0), ("allreduce", 25.0)),
}
CONNECTIONS = 4  # to each peer, tried with the first of them where there are several machines
SHARE = 10  # a run measures if its steps are as many times those of the trials
A_WHILE = 100  # steps, where nobody knows how many there are


@dataclass(frozen=True, kw_only=True)
class TrialSetting:
    """What a choice has to go by.

    Attributes:
        folder: the run's, where rank 0 keeps the choice; None: nowhere.
        steps: how many the run has left; None: nobody knows.
        tell: tells a person of rank 0's.
    """

    folder: Path | None = None
    steps: int | None = None
    tell: Callable[[Message], None] = lambda note: None


class Chooser:
    """Says at each step's begin which exchange is to go on.

    Args:
        candidates: what there is to choose from, one at least.
        members: the world.
        communicator: its ranks.
        device: where their parameters are.
        setting: what is known of the run.

    Attributes:
        first: the exchange to begin with.
    """

    def __init__(
        self,
        candidates: Sequence[SyncConfig],
        members: Members,
        communicator: Communicator,
        device: torch.device,
        setting: TrialSetting,
    ) -> None:
        self._candidates, self._members, self._setting = candidates, members, setting
        self._communicator, self._device = communicator, device
        self._trials: Trials | None = None
        self._before_trials = 0 if setting.steps is not None else A_WHILE
        self.first = self._current = self._begin()

    def next(self) -> SyncConfig | None:
        """Return the exchange that goes on from this step, if it is another; collective.

        Raises:
            CommError: a peer was lost, or silent.
            PacelineError: the choice can't be written down.
        """
        if self._trials is None:
            return None
        if self._before_trials:
            self._before_trials -= 1
            return None
        config = self._candidates[self._trials.begin()]
        if self._trials.outcome is not None:
            self._keep(self._trials.outcome)
            self._trials = None
        before, self._current = self._current, config
        return None if config == before else config

    def _begin(self) -> SyncConfig:
        """Choose what needs no trials, or begin them; collective."""
        candidates, setting = self._candidates, self._setting
        if len(candidates) == 1:
            return candidates[0]
        if (known := self._known()) is not None:
            self._tell(f"{_long(known)}, as this run has measured before ({CHOICE_NAME})")
            return known
        left, needed = setting.steps, steps_of_trials(len(candidates))
        plain = next((c for c in candidates if c.sync == "allreduce"), candidates[0])
        if left is not None and left < SHARE * needed:
            few = f"{left} steps are too few to measure what is best"
            short = few if left else "no step is left to measure what is best"
            self._tell(
                Message("{}; choose by {--sync} and {--bucket_mb}", f"{_long(plain)}: {short}")
            )
            return plain
        self._trials = Trials(len(candidates), time.perf_counter, self._mean)
        return candidates[0] if left is not None else plain

    def _known(self) -> SyncConfig | None:
        """Return what rank 0 knows to be chosen, if that still goes."""
        told = b""
        if self._communicator.rank == 0 and self._setting.folder is not None:
            choice = read_choice(self._setting.folder)
            if choice is not None and choice.machines == self._members.machines:
                told = json.dumps(_terms(choice)).encode()
        what = "the broadcast of rank 0's exchange"
        told = broadcast_bytes(self._communicator, told, self._device, what)
        known = json.loads(told) if told else None
        return next((c for c in self._candidates if _terms(c) == known), None)

    def _mean(self, values: Sequence[float]) -> Sequence[float]:
        own = torch.tensor(values, dtype=torch.float64, device=self._device)
        sums: Tensor = total(self._communicator, own, "the mean of measured steps")
        return [value / self._communicator.world_size for value in sums.tolist()]

    def _keep(self, outcome: Outcome) -> None:
        if self._communicator.rank > 0:
            return
        chosen = self._candidates[outcome.chosen]
        figures = {_short(self._candidates[c]): 1000 * s for c, s in outcome.seconds.items()}
        if self._setting.folder is not None:
            choice = Choice(
                sync=chosen.sync,
                bucket_mb=chosen.bucket_mb,
                wire=chosen.wire,
                connections=chosen.connections,
                machines=self._members.machines,
                milliseconds={name: round(value, 3) for name, value in figures.items()},
            )
            write_choice(self._setting.folder, choice)
        own = figures.pop(_short(chosen))
        others = ", ".join(f"{name} {_number(value)}" for name, value in figures.items())
        noise = f"{100 * outcome.noise:.2g}%"
        intra_machine = "" if own <= min(figures.values()) else f" (all within {noise} are equal)"
        flags = {"sync": chosen.sync, "bucket_mb": f"{chosen.bucket_mb:g}"}
        if chosen.connections > 1:
            flags["connections"] = str(chosen.connections)
        self._tell(
            Message(
                "{} ms a step; {}{}. Pin this choice with "
                + " ".join(f"{{--{flag}}} {value}" for flag, value in flags.items()),
                f"{_long(chosen)}: {_number(own)}",
                others,
                intra_machine,
            )
        )

    def _tell(self, text: str | Message) -> None:
        if self._communicator.rank == 0:
            self._setting.tell(Message("exchange: {}.", text))


def candidates_of(
    config: SyncConfig, trained: TrainedParameters, machines: Sequence[int], device: torch.device
) -> list[SyncConfig]:
    """List the exchanges to choose from: those that fit what was asked for, and differ.

    Args:
        config: what was asked for.
        trained: what is trained; sizes that give it the same buckets are one.
        machines: the number of ranks of each.
        device: where the parameters are.
    """
    if config.sync != "auto":
        return [config]
    if sum(machines) == 1:
        return [SyncConfig(sync="allreduce", bucket_mb=config.bucket_mb)]
    found = [(sync, size, config.connections) for sync, size in CANDIDATES[device.type]]
    if len(machines) > 1 and found[0][0] == "notified" and not _connections_given(config):
        found.append((*found[0][:2], CONNECTIONS))
    different: dict[object, SyncConfig] = {}
    for sync, size, connections in found:
        if sync == "allreduce" and config.asks_for_puts:
            continue
        fixed = replace(
            config,
            sync=sync,  # type: ignore[arg-type]
            bucket_mb=config.bucket_mb or size,
            connections=connections,
        )
        buckets = partition(trained.names, trained.groups, fixed.bucket_bytes)
        names = tuple(bucket.names for bucket in buckets)
        different.setdefault((sync, names, connections), fixed)
    return list(different.values())


def _connections_given(config: SyncConfig) -> bool:
    """Tell whether how many there are to be isn't auto's to choose."""
    return config.connections > 0 or config.transport == "nixl"


def _terms(exchange: SyncConfig | Choice) -> list[object]:
    return [exchange.sync, exchange.bucket_mb, exchange.wire, exchange.connections]


def _long(config: SyncConfig) -> str:
    by = f", {config.connections} connections" if config.connections > 1 else ""
    return f"{config.sync}, {config.bucket_mb:g} MB buckets{by}"


def _short(config: SyncConfig) -> str:
    by = f" x {config.connections}" if config.connections > 1 else ""
    return f"{config.sync} {config.bucket_mb:g} MB{by}"


def _number(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
