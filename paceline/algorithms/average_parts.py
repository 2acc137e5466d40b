"""Parts of a snapshot of `average`: what one worker alone has, and how others take it over.

A snapshot is taken where a round ends: all that was trained is in the merges that are under way,
whose sums the snapshot has. Only of fragments that are merged at other steps of the round a worker
has unmerged changes. So the part that its backup holder copies is empty but for these, and for
what a lossy wire still owes:

    shared   equal on all: anchor, state of the outer rule, sums of the merges under way
    local    needed by this worker alone, in memory: its weights, taken ones
    part     copied by the backup holder: samples, weights of unmerged fragments, residuals

The changes of a lost worker are merged, too: the worker that gets its part continues with the mean
of both workers' weights, weighted by samples, and counts the samples of both at the next merge:

    own = (m * own + n * lost) / (m + n)        m, n: samples since the last take of the fragment

So each sample counts once. Momenta, and weights that a rule lets a worker keep for itself (EASGD),
go with their worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.algorithms.average import Averaging
from paceline.comm.communicator import Communicator, total
from paceline.errors import RankStateError
from paceline.reduce.rank_state import restore_parts

SAMPLES = "samples"
UNMERGED = "unmerged"
RESIDUAL = "residual"
OWN = "own"
TAKEN = "taken"  # keys of the local state
_HALF = 0.5  # of a sample: numbers of samples are sums of fractions


def divide_state(
    average: Averaging,
) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    """Return (part, local, shared) between two steps; tensors are views of the state itself.

    Merges under way are awaited; they are applied in their step all the same.

    Raises:
        CommError: a peer was lost, or silent.
    """
    state = average.local()
    shared = average.shared()
    own = state[OWN]
    samples = state[SAMPLES]
    names = {
        name
        for fragment, count in zip(shared["fragments"], samples, strict=True)
        for name in fragment
        if count
    }
    part = {
        SAMPLES: samples,
        UNMERGED: {name: values for name, values in own.items() if name in names},
        RESIDUAL: state[RESIDUAL],
    }
    merged = {name: values for name, values in own.items() if name not in names}
    return part, {OWN: merged, TAKEN: state[TAKEN]}, shared


def restore_divided(
    average: Averaging,
    parts: Sequence[Mapping[str, Any]],
    local: Mapping[str, Any],
    shared: Mapping[str, Any],
    communicator: Communicator,
) -> bool:
    """Restore what `divide_state` returned, in the same world or another; collective.

    Args:
        average: restores it, between two steps.
        parts: this worker's; empty for a new worker, which begins with the anchor. Then those of
            workers that are gone.
        local: of this worker; a new one has none.
        shared: as returned on any worker.
        communicator: the workers.

    Returns:
        False where residuals had to be dropped.

    Raises:
        RankStateError: no rank has the part of a worker with unmerged changes.
    """
    own, *lost = parts
    counts = len(shared["fragments"])
    weights: dict[str, Tensor] = {}
    samples = [0.0] * counts
    taken: Mapping[str, Tensor] = {}
    if own:
        weights = {**local[OWN], **own[UNMERGED]}
        samples = own[SAMPLES]
        taken = local[TAKEN]
    for part in filter(None, lost):
        for number, names in enumerate(shared["fragments"]):
            given = part[SAMPLES][number]
            if given:
                both = samples[number] + given
                for name in names:
                    present = weights.get(name, shared["anchor"][name])
                    weights[name] = torch.lerp(present, part[UNMERGED][name], given / both)
                samples = [*samples[:number], both, *samples[number + 1 :]]
    _require_all(samples, shared[SAMPLES], communicator)
    average.restore(shared, {OWN: weights, TAKEN: taken, SAMPLES: samples, RESIDUAL: None})
    residuals = [(part.get(RESIDUAL) or {}) for part in parts]
    return restore_parts(average.residuals, residuals, communicator)


def _require_all(
    samples: Sequence[float],
    of_all: Sequence[int],
    communicator: Communicator,
) -> None:
    """Require that the workers have all samples that aren't merged yet; collective."""
    present = torch.tensor(samples, dtype=torch.float64)
    found = total(communicator, present, "the samples of all unmerged changes").tolist()
    if any(one < expected - _HALF for one, expected in zip(found, of_all, strict=True)):
        raise RankStateError(
            "no rank has the part of a lost worker, whose latest changes weren't merged"
        )
