"""Errors of one image; what it belongs to, a file or a record, is the caller's to name."""

from __future__ import annotations


class DamagedImage(Exception):
    """Error of an image that can't be decoded; its text is the reason."""


class UnreadImage(DamagedImage):
    """Error of a sound image that can't be decoded as it is.

    Args:
        reason: the reason, a clause.
        remedy: what a user can do, a sentence without a full stop.
    """

    def __init__(self, reason: str, *, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy
