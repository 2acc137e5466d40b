"""Process of a script: what started it, and how it and its peers learn of each other's end."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.api.exit_handler import ExitHandler
from paceline.cluster.join import Joined
from paceline.cluster.stores.waiting import call_with_timeout
from paceline.cluster.supervision.interactive_signals import InteractiveSignals
from paceline.errors import CommError, many
from paceline.state.run_folder import RunFolder

_STORE_S = 2.0  # timeout of a store call at an end


@dataclass(kw_only=True, eq=False)
class ScriptProcess:
    """Process of a script, among those that were started with it.

    Attributes:
        joined: the joined world.
        interactive_signals: receives SIGTERM and SIGINT in an interactive interpreter.
        exit_handler: reports a failure of the script.
        folder: the run folder as this process has it locked, or None.
    """

    joined: Joined
    interactive_signals: InteractiveSignals
    exit_handler: ExitHandler
    folder: RunFolder | None = None

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
