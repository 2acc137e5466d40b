"""Errors of one image; what it belongs to, a file or a record, is the caller's to name."""

from __future__ import annotations


class DamagedImage(Exception):
    """Error of an image that can't be decoded; its text is the reason, a clause."""

    def sentence(
        self, name: str, *, state: str = "has a damaged image", otherwise: str = ""
    ) -> str:
        """Say what is wrong, and what to do.

        Args:
            name: what the image belongs to.
            state: what damage makes of it.
            otherwise: what can be done besides the remedy, a clause that continues it.
        """
        return f"{name} {state}: {self}. Repair or remove it{otherwise}."


class UnreadImage(DamagedImage):
    """Error of a sound image that can't be decoded as it is.

    Args:
        reason: the reason, a clause.
        remedy: what a user can do, a sentence without a full stop.
    """

    def __init__(self, reason: str, *, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy

    def sentence(self, name: str, *, state: str = "can't be read", otherwise: str = "") -> str:
        return f"{name} can't be read: {self}. {self.remedy}{otherwise}."
