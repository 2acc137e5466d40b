"""numba's compiler, whose machine code is kept on disk, as far as the disk goes along.

numba ends with an error where nothing can be written (a read-only installation and no home), where
the disk is full, and where a power cut has torn a file of its cache. None of them is a reason to
end a run: a process then compiles for itself.
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
        with suppress(RuntimeError, OSError):  # no folder can be written to
            dispatcher._cache = _Cache(function)
        return dispatcher

    return compiled


class _Cache(_FunctionCache):  # type: ignore[misc]
    def load_overload(self, sig: object, target_context: object) -> object:
        """Return what was compiled before; None if it can't be read."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # whatever a torn file makes of unpickling
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: object, data: object) -> None:
        """Keep what was compiled, if there is room."""
        with suppress(OSError):
            super().save_overload(sig, data)
