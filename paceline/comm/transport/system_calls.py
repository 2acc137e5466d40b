"""System calls that functions compiled by numba make by themselves, without the interpreter.

The lock is a pthread mutex in this module's memory. Python locks it without releasing the
interpreter's lock; the compiled event loop never needs the interpreter's. Both hold it briefly.
"""

from __future__ import annotations

import ctypes
import threading
from importlib import import_module
from typing import Any

import numpy as np

from paceline.comm.numba_compiler import compiler

numba: Any = import_module("numba")  # its own types are for what it compiles, not for callers
types = numba.types

_MUTEX_WORDS = 16  # 128 bytes, more than any pthread_mutex_t; all zero is an unlocked one
_I32 = types.int32
_WORD = types.intp

# PyDLL keeps the interpreter's lock: these calls take less than a microsecond, and to get the lock
# back from a thread that computes would take milliseconds.
_LIBC = ctypes.PyDLL(None)
_write = _LIBC.write
_write.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_int64), ctypes.c_size_t]

jit = compiler()
sendmsg = types.ExternalFunction("sendmsg", _WORD(_I32, _WORD, _I32))
send = types.ExternalFunction("send", _WORD(_I32, _WORD, _WORD, _I32))
recv = types.ExternalFunction("recv", _WORD(_I32, _WORD, _WORD, _I32))
poll = types.ExternalFunction("poll", _I32(_WORD, _WORD, _I32))
read = types.ExternalFunction("read", _WORD(_I32, _WORD, _WORD))
write = types.ExternalFunction("write", _WORD(_I32, _WORD, _WORD))
setsockopt = types.ExternalFunction("setsockopt", _I32(_I32, _I32, _I32, _WORD, _I32))
lock = types.ExternalFunction("pthread_mutex_lock", _I32(_WORD))
unlock = types.ExternalFunction("pthread_mutex_unlock", _I32(_WORD))
clock_gettime = types.ExternalFunction("clock_gettime", _I32(_I32, _WORD))
_errno_location = types.ExternalFunction("__errno_location", types.CPointer(_I32)())


@jit
def errno():  # type: ignore[no-untyped-def]
    """Return the error of this thread's last call."""
    return numba.carray(_errno_location(), (1,))[0]


@jit
def address(array):  # type: ignore[no-untyped-def]
    """Return where an array's memory begins."""
    return array.ctypes.data


class Lock:
    """Mutex shared by Python and the compiled event loop, which locks it by address.

    Only one Python thread may use the mutex at a time. A second thread would hold the GIL while it
    is blocked on the mutex, but the first may need the GIL before it can unlock the mutex.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._memory = np.zeros(_MUTEX_WORDS, np.int64)
        self.address = self._memory.ctypes.data
        self._lock = _LIBC.pthread_mutex_lock
        self._unlock = _LIBC.pthread_mutex_unlock
        self._lock.argtypes = self._unlock.argtypes = [ctypes.c_void_p]

    def __enter__(self) -> None:
        self._turn.acquire()
        self._lock(self.address)

    def __exit__(self, *_: Any) -> None:
        self._unlock(self.address)
        self._turn.release()


def write_word(descriptor: int, word: int) -> None:
    """Write a word to a pipe or an event that has room, and keep the interpreter's lock."""
    _write(descriptor, ctypes.c_int64(word), 8)
