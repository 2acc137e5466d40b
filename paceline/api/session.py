"""`Session`: what `join` knows of a process before it connects, and how it reaches its peers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from paceline.api.argument_names import print_message_for_scripts
from paceline.api.exit_handler import ExitHandler
from paceline.cluster.join import Joined
from paceline.cluster.membership.evidence import EvidenceOptions
from paceline.cluster.membership.protocol import Membership
from paceline.cluster.membership.static import StaticMembership
from paceline.cluster.rendezvous.preflight import compare
from paceline.cluster.stores.waiting import call_with_timeout
from paceline.cluster.supervision.interactive_signals import InteractiveSignals
from paceline.cluster.supervision.stop_signals import StopSignals
from paceline.config.run import OutputConfig
from paceline.errors import CommError, many
from paceline.generation.run import Run
from paceline.session.connect import connect_run
from paceline.state.run_folder import RunFolder

_STORE_S = 2.0  # timeout of a store call at an end


@dataclass(frozen=True, kw_only=True)
class Session:
    """Session of one process: its world, device, timeouts, run folder and open resources.

    Attributes:
        joined: the joined world.
        device: device of the tensors in collectives.
        timeouts: in seconds: one for the start and the first step, one for later operations.
        peer_timeout: seconds without a sign of life after which a peer counts as lost.
        idle_timeout: seconds for which a peer may work outside a step while others wait.
        run: the run folder, or None.
        output: when to save checkpoints, and from which checkpoint to resume.
        seed: seed of the sample order and of each step's random streams.
        default_group: whether torch has a default group of all ranks, which survives no loss.
        signals: receives SIGTERM and SIGINT as requests to stop, in a script.
        interactive_signals: receives them in an interactive interpreter.
        exit_handler: reports a failure of the script.
        resources: what the world's `close` closes, in reverse order of opening.
        folder: the run folder as this process has it locked, or None.
        membership: says which processes are in the world; a static one until it is joined.
    """

    joined: Joined
    device: torch.device
    timeouts: tuple[float, float]
    peer_timeout: float
    idle_timeout: float
    run: Path | None
    output: OutputConfig
    seed: int
    signals: StopSignals
    interactive_signals: InteractiveSignals
    exit_handler: ExitHandler
    resources: ExitStack
    default_group: bool = False
    folder: RunFolder | None = None
    membership: Membership = field(default_factory=StaticMembership)

    @property
    def identity(self) -> dict[str, object]:
        """The arguments that distinguish this run from another."""
        return {"seed": self.seed}

    def require_equal(self, subject: str, facts: Mapping[str, object]) -> None:
        """Require the same facts on all ranks; collective, once per subject.

        Raises:
            ConfigError: two ranks differ; names both values.
            CommError: a rank is late, or the run has ended.
        """
        texts = {name: str(value) for name, value in facts.items()}
        joined = self.joined
        limit = self.timeouts[0]
        compare(
            joined.store,
            joined.group,
            subject,
            texts,
            timeout=limit,
            activities=self.membership.activities,
        )

    def connect(self) -> Run:
        """Connect with all ranks until the world ends; collective.

        Raises:
            CommError: a rank is late, or can't be reached.
        """
        joined = self.joined
        return connect_run(
            joined.group,
            joined.store,
            self.resources,
            device=self.device,
            limits=self.timeouts,
            # Other launchers end all processes where one is lost.
            survives=joined.launcher == "paceline" and not self.default_group,
            signals=self.signals,
            options=EvidenceOptions(
                peer_timeout=self.peer_timeout,
                timeout=self.timeouts[1],
                idle_timeout=self.idle_timeout,
            ),
            report=print_message_for_scripts,
        )

    def post_end(self, steps: int) -> None:
        """Record in the store that this rank ends well after so many steps."""
        group = self.joined.group
        call_with_timeout(
            _STORE_S, lambda: self.joined.store.set(self._end_key(group.rank), str(steps))
        )

    def ended_peer(self, steps: int, operation: str) -> CommError | None:
        """Return the error for a peer that has ended well, too early for an operation, if any.

        Args:
            steps: how many this rank has made.
            operation: what the peer is missing from.
        """
        group = self.joined.group
        store = self.joined.store

        def look() -> CommError | None:
            for rank in range(group.size):
                if store.check([self._end_key(rank)]):
                    made = int(store.get(self._end_key(rank)))
                    if made <= steps:
                        name = group.generation.describe(rank)
                        return CommError(
                            f"{name} closed its world after {many(made, 'step')} and is missing "
                            f"from {operation}: all ranks must make the same steps and calls; a "
                            "rank that has no more samples must call world.step(samples=0)."
                        )
            return None

        return call_with_timeout(_STORE_S, look)

    def _end_key(self, rank: int) -> str:
        return f"{self.joined.group.generation.key_prefix}/ended/{rank}"
