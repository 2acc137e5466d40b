"""Description of an error in a user's model: what it is, and where in the user's code.

    RuntimeError: shape '[4, 10]' is invalid (model.py, line 11)

A traceback of ours and torch's would bury the one line that they can change.
"""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path

import torch

_OURS = Path(__file__).parents[1]
_OTHERS = {_OURS, Path(torch.__file__).parent, Path(importlib.__file__).parent}
_ZOO = Path(__file__).parent
_LONGEST = 200  # characters of an error's text


def described(error: BaseException) -> str:
    """Return an error's type, first line and innermost place in code that isn't torch's or ours."""
    text = str(error).strip().partition("\n")[0][:_LONGEST]
    what = type(error).__name__ + (f": {text.rstrip('.')}" if text else "")
    theirs = [f for f in _frames(error) if not _OTHERS & {*Path(f.filename).parents}]
    written = [f for f in theirs if not f.filename.startswith("<")]  # "<frozen …>", "<string>"
    if not written:
        return what
    return f"{what} ({Path(written[-1].filename).name}, line {written[-1].lineno})"


def is_ours(error: BaseException) -> bool:
    """Return whether an error was raised by Paceline's own code, its models excepted: a bug."""
    raised = Path(_frames(error)[-1].filename)
    return _OURS in raised.parents and _ZOO not in raised.parents


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error is for lack of memory, a GPU's or the machine's."""
    text = str(error).lower()
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(word in text for word in words)


def _frames(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)
