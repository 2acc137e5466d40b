"""System calls for the event loop in plain Python, without numba."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_ssize_t, c_uint, c_ulong, c_void_p
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_LIBC = ctypes.CDLL(None, use_errno=True)
_LOCK = threading.Lock()  # of all event loops; each holds it briefly


def jit(function: _Function) -> _Function:
    """Leave a function as it is."""
    return function


def address(array: Any) -> int:
    """Return where an array's memory begins."""
    where: int = array.ctypes.data
    return where


def errno() -> int:
    """Return the error of this thread's last call."""
    return ctypes.get_errno()


def lock(address: int) -> None:
    """Acquire the lock."""
    _LOCK.acquire()


def unlock(address: int) -> None:
    """Release the lock."""
    _LOCK.release()


class Lock:
    """Mutex of the event loop (plain Python version)."""

    address = 0

    def __enter__(self) -> None:
        _LOCK.acquire()

    def __exit__(self, *_: Any) -> None:
        _LOCK.release()


def _call(name: str, result: Any, *arguments: Any) -> Callable[..., int]:
    function = getattr(_LIBC, name)
    function.restype, function.argtypes = result, arguments

    def call(*values: Any) -> int:
        number: int = function(*map(int, values))  # ctypes takes none of numpy's
        return number

    return call


sendmsg = _call("sendmsg", c_ssize_t, c_int, c_void_p, c_int)
send = _call("send", c_ssize_t, c_int, c_void_p, c_size_t, c_int)
recv = _call("recv", c_ssize_t, c_int, c_void_p, c_size_t, c_int)
poll = _call("poll", c_int, c_void_p, c_ulong, c_int)
setsockopt = _call("setsockopt", c_int, c_int, c_int, c_int, c_void_p, c_uint)
read = _call("read", c_ssize_t, c_int, c_void_p, c_size_t)
write = _call("write", c_ssize_t, c_int, c_void_p, c_size_t)
clock_gettime = _call("clock_gettime", c_int, c_int, c_void_p)


def write_word(descriptor: int, word: int) -> None:
    """Write a word to a pipe or an event that has room."""
    os.write(descriptor, word.to_bytes(8, "little", signed=True))
