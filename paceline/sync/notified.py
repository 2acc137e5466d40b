"""`notified`: gradients go to their owners by puts, sums come back, and a layer waits for its own.

    gradient_ready        pack, put each shard to its owner             most urgent: read first
    owner's thread        all ranks' parts are there: add, put back
    before_read           wait for this bucket's sums, update           in the next forward

Nobody issues in an order that others must keep, so a bucket waits for nothing but itself. No wait
of a rank is for one that waits for it: a sum needs parts only, a part needs its sender's backward
only, and a backward needs the sums of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.comm.window import Window
from paceline.sync.bucket import Bucket
from paceline.sync.layout import lay_out
from paceline.sync.owner import Owner
from paceline.sync.replicated import Replicated
from paceline.sync.statistics import RunningStatistics
from paceline.sync.updater import Updater

OpenWindow = Callable[[int, int], Window]  # of a size and a number of notifications


class Notified(Replicated):
    """A synchronizer on windows.

    Args:
        buckets: what is exchanged; fewer bytes a bucket, a finer order.
        open_window: opens this rank's window of this binding; collective.
        updater: updates every parameter, on every rank.
        statistics: the model's running statistics, exchanged in every step.
        world_size: the number of ranks.
        limit: seconds to wait for a peer.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        open_window: OpenWindow,
        updater: Updater,
        statistics: RunningStatistics,
        world_size: int,
        limit: float,
    ) -> None:
        sizes = [(bucket.length, bucket.parameters[0].dtype) for bucket in buckets]
        if statistics.flat is not None:
            sizes.append((statistics.flat.numel(), statistics.flat.dtype))
        layout = lay_out(sizes, world_size)
        owner = Owner(open_window(layout.size, layout.notifications), layout, limit)
        super().__init__(buckets, owner, updater, statistics, world_size)
