"""The system calls of the event loop: compiled by numba, or plain where it isn't installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_KIND = "plain" if find_spec("numba") is None else "compiled"
_CALLS: Any = import_module(f"paceline.comm.transport.system_calls_{_KIND}")

Lock, write_word = _CALLS.Lock, _CALLS.write_word
jit, address, errno = _CALLS.jit, _CALLS.address, _CALLS.errno
lock, unlock, poll = _CALLS.lock, _CALLS.unlock, _CALLS.poll
setsockopt = _CALLS.setsockopt
clock_gettime = _CALLS.clock_gettime
sendmsg, recv, read, write = _CALLS.sendmsg, _CALLS.recv, _CALLS.read, _CALLS.write
