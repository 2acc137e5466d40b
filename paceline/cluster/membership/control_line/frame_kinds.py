"""Kinds of the membership's frames, and the names, keys and secret of the control line's ends.

VOTE       a message of a vote                        STORE      of a later generation's store
LEFT       a member left a generation                 PROMISED   its machine takes part in a vote
EXITED     a supervisor reports a worker's end        PROGRESS   the step in which a member is
LEAVING    a member ends well                         END        the whole run is to end
SUSPECTED  members that one suspects, and why         ACTIVITY   what a member does for long
"""

from __future__ import annotations

from paceline.cluster.membership.generation import Generation
from paceline.comm.handshake import secret_of

VOTE = "vote"
STORE = "store"
END = "end"
SUSPECTED = "suspected"
ACTIVITY = "activity"
LEFT = "left"
PROMISED = "promised"
EXITED = "exited"
PROGRESS = "progress"
LEAVING = "leaving"


def supervisor_name(machine: int) -> str:
    """Return the name of a machine's supervisor on the control line."""
    return f"supervisor/{machine}"


def supervisor_key(generation: Generation, machine: int) -> str:
    """Return the key in the store under which a machine's supervisor publishes its address."""
    return f"{generation.key_prefix}/supervisor/{machine}"


def control_secret(generation: Generation) -> bytes:
    """Return the secret of the control line, of the first generation of a start."""
    return secret_of(generation.token, "control line")
