"""System calls of compiled loops: those that numba compiles, or plain ones where it is missing."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_KIND = "plain" if find_spec("numba") is None else "compiled"
CALLS: Any = import_module(f"paceline.comm.transport.system_calls_{_KIND}")
