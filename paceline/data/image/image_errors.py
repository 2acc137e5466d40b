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


def image_sentence(name: str, error: DamagedImage) -> str:
    """Return what is wrong with an image, and the remedy of one that isn't damaged.

    Args:
        name: of its file or record.
        error: the error.
    """
    if isinstance(error, UnreadImage):
        return f"{name} can't be read: {error}. {error.remedy}."
    return f"{name} has a damaged image: {error}."
