"""The command of the servers that a supervisor starts beside its workers."""

from __future__ import annotations

import sys

from paceline.cluster.supervision.server_command import ServerCommand


def server_command(role: str, count: int) -> ServerCommand:
    """Return the command that starts `count` servers of a role on this machine."""
    argv = [sys.executable, "-m", "paceline.cli.main", "serve"]
    return ServerCommand(argv=argv, role=role, count=count)
