"""Opening of `average`: a window for the merges of a model's weights, and what makes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor
from torch.optim import Optimizer

from paceline.algorithms.average import Averaging, weights_name
from paceline.algorithms.merged_bucket import MergedBucket, make_buckets
from paceline.algorithms.merged_momenta import MergedMomenta
from paceline.algorithms.open_exchange import PutOptions, bucket_spec, open_exchange
from paceline.reduce.buckets import Bucket
from paceline.update.batch_norm import RunningStatistics
from paceline.update.momenta import find_momenta
from paceline.update.outer.fragments import cut_into_fragments
from paceline.update.outer.outer_rule import OuterRule
from paceline.update.outer.round_schedule import RoundSchedule


def open_average(
    buckets: Sequence[Bucket],
    statistics: RunningStatistics,
    options: PutOptions,
    rule: OuterRule,
    schedule: RoundSchedule,
    *,
    fragments: int = 1,
    mix: float | None = None,
    averaged: Optimizer | None = None,
    forgets: Optimizer | None = None,
) -> Averaging:
    """Open a window, and make what merges a model's weights over it; collective.

    Args:
        buckets: of the parameters.
        statistics: the model's running statistics.
        options: of the exchange; ranks of a machine share memory, on GPUs too.
        rule: merges each bucket.
        schedule: of the rounds.
        mix: as of `Averaging`.
        averaged: the optimizer whose momenta are averaged, too, unencoded; None: they stay.
        forgets: the optimizer whose state each merge resets; None: it stays.

    Raises:
        ConfigError: there are more fragments than buckets, or the optimizer has no momenta.
    """
    of_model = make_buckets(buckets, statistics, rule)
    momenta = [] if averaged is None else find_momenta(averaged, buckets)
    merged: list[MergedBucket | MergedMomenta] = [*of_model]
    parts = _fragments(buckets, of_model, fragments)
    for index, each in enumerate(momenta):
        indices = next(part for part in parts if index in part)
        for values in each:
            indices.append(len(merged))
            flat = of_model[index].anchor.new_empty(sum(values.lengths), dtype=values.dtype)
            merged.append(MergedMomenta(values, flat))
    plain = replace(options, codec=None)
    specs = [bucket_spec([each.change], options) for each in merged[: len(buckets)]]
    specs += [bucket_spec([each.change], plain) for each in merged[len(buckets) :]]
    specs = [replace(spec, suppresses_zeros=True) for spec in specs]  # of unchanged values
    templates = [[bucket.change] for bucket in merged]
    names = [(weights_name(index),) for index in range(len(merged))]
    options.recorder.event("buckets", parameters=[bucket.values.names for bucket in merged])
    opened = open_exchange(templates, names, specs, options, count=len(merged))
    return Averaging(
        merged,
        parts,
        opened.exchange,
        schedule,
        mix=mix,
        forgets=forgets,
        recorder=options.recorder,
        timeline=options.timeline,
        startup=opened.startup,
        residuals=opened.residuals,
    )


def size_of_buckets(parameters: Iterable[Tensor], limit: int, fragments: int) -> int:
    """Return the bytes of a bucket: `limit`; less where a fragment would have no bucket."""
    total = sum(p.nbytes for p in parameters if p.requires_grad)
    return min(limit, max(1, total // fragments))


def _fragments(
    buckets: Sequence[Bucket], merged: Sequence[MergedBucket], count: int
) -> list[list[int]]:
    """Divide the buckets, in the model's order; running statistics are in the first fragment."""
    forward = list(reversed(buckets))
    sizes = [merged[bucket.index].anchor.nbytes for bucket in forward]
    fragments = [[forward[i].index for i in part] for part in cut_into_fragments(sizes, count)]
    fragments[0] += range(len(buckets), len(merged))
    return fragments
