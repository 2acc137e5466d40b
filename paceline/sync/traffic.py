"""How many bytes of a run travel between groups, a pure function of the layout.

What ranks of a group hand each other in shared memory isn't sent.
"""

from __future__ import annotations

from paceline.sync.layout import Run
from paceline.sync.place import Place


def traffic(run: Run, place: Place) -> tuple[int, int]:
    """Return the bytes that a rank sends and receives when a run is exchanged once.

    It sends each other group that group's shard, behind a head, and gets it back added up; its own
    shard comes from each of them and goes back. Frames' heads, and flags of parameters that not
    everybody used, aren't counted.
    """
    if place.channel is None:
        return 0, 0
    own = _coded(run, place.channel, place.group)
    others = [_coded(run, place.channel, group) for group in place.across]
    sent = sum(run.head + size for size in others) + own * len(others)
    received = sum(others) + (run.head + own) * len(others)
    return sent, received


def _coded(run: Run, channel: int, group: int) -> int:
    shard = run.shard(channel, group)
    return run.spec.coded(shard.stop - shard.start)
