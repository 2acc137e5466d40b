"""The version of Paceline, here rather than in metadata: a source tree needn't be installed."""

from __future__ import annotations

VERSION = "0.1.0"
