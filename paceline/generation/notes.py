"""Notes for the user of a run: how they name options, and whether this process shows them."""

from __future__ import annotations

from paceline.cluster.print_message import print_message
from paceline.errors import Message


class Notes:
    """Notes of `paceline train`: they name options as flags, and its console shows the events."""

    def text(self, note: str | Message) -> str:
        """Return a note as the user reads it."""
        return str(note)

    def print(self, note: str | Message) -> None:
        """Print a note on standard error: there is no recorder yet, or no longer."""
        print_message(self.text(note))

    def show(self, note: str | Message) -> None:
        """Show a note that is recorded as well: the console does, so nothing is printed here."""
