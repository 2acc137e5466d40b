"""`notified`: gradients go to their owners by puts, sums come back, and a layer waits for its own.

    gradient_ready        put each shard to its owner                   most urgent: read first
    owner's thread        all ranks' parts are there: add, put back
    before_read           wait for this bucket's sums, update           in the next forward

Nobody issues in an order that others must keep, so a bucket waits for nothing but itself. No wait
of a rank is for one that waits for it: a sum needs parts only, a part needs its sender's backward
only, and a backward needs the sums of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.algorithms.data_parallel import DataParallel
from paceline.codecs.codecs import CODECS, Codec
from paceline.comm.communicator import Communicator
from paceline.comm.window import Window
from paceline.recorder import Recorder
from paceline.reduce.buckets import Bucket
from paceline.reduce.exchange import Exchange
from paceline.reduce.gpu_staging import GpuStaging, pinned_like
from paceline.reduce.machine_sums import MachineSums
from paceline.reduce.put_engine.layout import BucketSpec, Topology, lay_out
from paceline.reduce.put_engine.put_exchange import PutExchange
from paceline.reduce.rank_state import RankState
from paceline.reduce.residuals import CodedBucket, Residuals
from paceline.update.batch_norm import RunningStatistics
from paceline.update.updater import Updater

OpenWindow = Callable[[int, int], Window]  # of a size and a number of notifications


class Notified(DataParallel):
    """A synchronizer on windows.

    Attributes:
        returns_parameters: of buckets, in place of sums.

    Args:
        buckets: what is exchanged; fewer bytes a bucket, a finer order.
        open_window: opens this rank's window of this binding, collectively; ranks of a group share
            memory there.
        updater: updates every parameter, on every rank.
        statistics: the model's running statistics, exchanged in every step.
        topology: which ranks share memory, and add up among themselves first.
        limits: seconds to wait for a peer, in the first step and later.
        steady: is called after the first step.
        codec: how gradients in float32 travel between groups; others travel as they are.
        recorder: measures, as `DataParallel` says.
        staged: parameters are in a device's memory, and their gradients go through the CPU's.
        intra_machine: connects the ranks of this group, which sum by its collectives on the device;
            the first of them alone stages the sums and exchanges them by its window.
    """

    returns_parameters = False

    def __init__(
        self,
        buckets: Sequence[Bucket],
        open_window: OpenWindow,
        updater: Updater,
        statistics: RunningStatistics,
        topology: Topology,
        limits: tuple[float, float],
        steady: Callable[[], None] = lambda: None,
        codec: Codec = CODECS["fp32"],
        recorder: Recorder | None = None,
        staged: bool = False,
        intra_machine: Communicator | None = None,
    ) -> None:
        templates: list[list[Tensor]] = [list(bucket.parameters) for bucket in buckets]
        names = [bucket.names for bucket in buckets]
        specs = [_spec(tensors, codec, self.returns_parameters) for tensors in templates]
        if statistics.flat is not None:
            specs.append(_spec([statistics.flat], CODECS["fp32"]))
            templates.append([statistics.flat])
            names.append(("the running statistics",))
        exchanging = topology if intra_machine is None else topology.leaders
        layout = lay_out(specs, exchanging)
        window = open_window(layout.size, layout.notifications)
        if recorder is not None:
            recorder.event("notifications", texts=layout.tells)

        def own(sent: Sequence[Sequence[Tensor]]) -> PutExchange:
            self._owner = PutExchange(window, layout, sent, names, limits, steady)
            return self._owner

        leads = window.rank in exchanging.ranks
        exchange: Exchange
        if intra_machine is not None:
            ranks = topology.groups[topology.group_of(window.rank)]
            how = (len(buckets), limits, steady)
            exchange = MachineSums(ranks, intra_machine, own, templates, names, *how)
            if not leads:
                window.close()  # it has no peers
        elif staged:
            sent = [[pinned_like(tensor) for tensor in tensors] for tensors in templates]
            exchange = GpuStaging(own(sent), templates, sent, names, limits)
        else:
            exchange = own(templates)
        super().__init__(buckets, exchange, updater, statistics, window.world_size, recorder)
        feedbacks = self._owner.feedbacks if leads else [None] * len(specs)
        self._coded = [
            CodedBucket(
                bucket_layout=bucket_layout, templates=tensors, names=words, feedback=feedback
            )
            for bucket_layout, tensors, words, feedback in zip(
                layout.buckets, templates, names, feedbacks, strict=True
            )
            if bucket_layout.spec.codec is not None and len(exchanging.groups) > 1
        ]
        self._exchanging, self._rank = exchanging, window.rank

    @property
    def state(self) -> RankState | None:
        """What a lossy wire has yet to send."""
        if not self._coded:
            return None
        return Residuals(self._coded, self._exchanging, self._rank, applied=self._applied)


def _spec(tensors: Sequence[Tensor], codec: Codec, updated: bool = False) -> BucketSpec:
    """Describe the run of some tensors of one dtype."""
    dtype = tensors[0].dtype
    coded = codec.lossy and dtype is torch.float32
    lengths = tuple(tensor.numel() for tensor in tensors)
    return BucketSpec(lengths=lengths, dtype=dtype, codec=codec if coded else None, updated=updated)
