"""Turns off garbage collection in multiprocessing's fork server, until `frozen_imports`."""

from __future__ import annotations

import gc

gc.disable()
