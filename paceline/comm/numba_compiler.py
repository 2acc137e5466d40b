"""numba's compiler with a cache of machine code on disk, where the disk permits it.

numba raises an error where it cannot write (a read-only installation and no home), where the disk
is full, and where a power cut has damaged a file of its cache. In these cases a process compiles in
memory, and the run continues.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

numba: Any = import_module("numba")  # its own types are for what it compiles, not for callers
_FunctionCache: Any = import_module("numba.core.caching").FunctionCache


def compiler(**options: object) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that has numba compile a function, free of the interpreter's lock.

    Args:
        options: of `numba.njit`.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(nogil=True, **options)(function)
        with suppress(RuntimeError, OSError):  # no folder is writable
            dispatcher._cache = _Cache(function)
        return dispatcher

    return compiled


class _Cache(_FunctionCache):  # type: ignore[misc]
    """Numba code cache that ignores errors in reading or writing its files."""

    def load_overload(self, sig: object, target_context: object) -> object:
        """Return the cached machine code; None if it cannot be read."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # unpickling a damaged file may raise anything
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: object, data: object) -> None:
        """Cache machine code, if there is room."""
        with suppress(OSError):
            super().save_overload(sig, data)
