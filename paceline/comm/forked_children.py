"""Connections that a forked child closes, such as a data loader's worker process.

A child inherits all descriptors. If this process is killed, its peers would take a connection for
open as long as a child lives that holds the connection too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

Owner = TypeVar("Owner")
_CLOSES: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()


def close_in_children(owner: Owner, close: Callable[[Owner], None]) -> None:
    """Call `close(owner)` in each process forked from now on, as long as the owner lives.

    Args:
        owner: owner of connections.
        close: closes the child's descriptors of them, and sends nothing; holds no owner itself.
    """
    _CLOSES[owner] = close


def _close_all() -> None:
    # No lock is taken: another thread of the parent may
    # have held it at the fork, and it doesn't run here.
    for owner, close in list(_CLOSES.items()):
        close(owner)


os.register_at_fork(after_in_child=_close_all)
