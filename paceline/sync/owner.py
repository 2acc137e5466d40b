"""Adds up what ranks have, by puts and notifications: this rank's part of it, and as an owner.

    this rank's values ─┬─▶ its group's owners ── add, in rank order ──┐     (shared memory)
                        └── its own slice                              ▼
    the other groups' owners of its channel ◀── shards ──▶ add, in group order, and send back
                                                                       ▼
    the sums, which all ranks of a group read                   notify the group

A thread does what comes after `send`, so that sums go out while this rank computes. A version
counts the exchanges of a run. Nothing is acknowledged, because it is implied: a rank sends version
v + 1 of a run only after it has read version v of all its sums, so whoever has version v + 1 of
everybody's part knows that nobody needs anything of v any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.comm.window import Window
from paceline.errors import CommError, CommTimeout
from paceline.sync.arithmetic import add_up, scale
from paceline.sync.bucket import like
from paceline.sync.layout import Layout, Run
from paceline.sync.place import Place, read_head, write_head
from paceline.sync.sources import Part, Piece, Sources, cut

_PATIENCE_S = 0.5


@dataclass
class _Course:
    """How far the versions of a run have come, and what is at hand of the last one."""

    run: Run
    sources: Sources
    sums: Tensor
    views: list[Tensor]
    sent: int = 0
    gathered: int = 0  # the group's own part of this rank's slice is there
    summed: int = 0  # this rank's shard is added up
    done: int = 0  # all sums of this rank's channel are in place
    told: int = 0  # the group knows the flags
    waited: int = 0
    part: Part | None = None
    ours: list[Piece] = field(default_factory=list)  # the group's part of the slice
    weight: float = 1.0  # that it is yet to be multiplied by
    flags: Tensor | None = None


class Owner:
    """Exchanges runs over a window, and owns this rank's shard of every run.

    Args:
        window: this rank's; nobody else uses it.
        layout: of the window, the same on all ranks.
        templates: of each run, tensors of its parameters' shapes and strides.
        names: of each run, the parameters' names.
        limits: seconds to wait for a peer, in the first step and later.
        steady: is called after the first step.
    """

    def __init__(
        self,
        window: Window,
        layout: Layout,
        templates: Sequence[Sequence[Tensor]],
        names: Sequence[Sequence[str]],
        limits: tuple[float, float],
        steady: Callable[[], None] = lambda: None,
    ) -> None:
        self._window = window
        self._place = Place(layout, window)
        self._courses = [
            self._course(*run) for run in zip(layout.runs, templates, names, strict=True)
        ]
        self._limit, self._later = limits
        self._steady = steady
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="owner", daemon=True)
        self._thread.start()

    def steady(self) -> None:
        """Wait less long from now on."""
        self._limit = self._later
        self._steady()

    def begin(self, *, kept: bool) -> None:
        """Expect a step; runs have versions, so there is nothing to do."""

    def next(self, index: int) -> int:
        """Return the run itself: they arrive in no order."""
        return index

    def send(self, index: int, values: Sequence[Tensor | None], weight: float) -> None:
        """Hand this rank's values to the owners, the more urgent the sooner they are read."""
        course = self._courses[index]
        run, place = course.run, self._place
        part, version = course.sources.part(values, weight), course.sent + 1
        for channel, owner in enumerate(place.owners):
            if owner != place.rank:
                head, room = place.local_room(run, owner, place.rank)
                write_head(head, 1.0, part.flags)
                for start, stop, piece in part.within(run.channel(channel)):
                    scale(piece, weight, room[start:stop])
                self._window.put(owner, 0, None, index, version, -index)
        if len(place.members) == 1 and place.across and run.spec.raw:
            self._put_shards(run, part.pieces, weight, part.flags, version)
        with self._changed:
            course.part, course.sent = part, version
        self._window.nudge()

    def wait(self, index: int, operation: str) -> list[Tensor | None]:
        """Return the sums of a run's last version.

        Raises:
            CommError: a peer was lost, or silent.
            ConfigError: a gradient was written since it was sent.
        """
        course, place = self._courses[index], self._place
        version, row = course.sent, len(self._courses) + index
        course.waited = version
        senders = [owner for owner in place.owners if owner != place.rank]
        if not place.neighbours and _lands_in_sums(course.run):
            senders = list(place.across.values())
        for peer in senders:
            self._window.wait(peer, row, version, limit=self._limit, operation=operation)
        if place.channel is not None:
            self._wait_for_thread(course, version, operation)
        part, course.part, course.ours = course.part, None, []  # gradients needn't be kept
        assert part is not None
        part.refuse_writes()
        if part.flags.all():
            return list(course.views)
        self._wait_for_flags(index, version, operation)
        used = place.flags(course.run).tolist()
        return [view if flag else None for view, flag in zip(course.views, used, strict=True)]

    def close(self) -> None:
        """End the thread, and the window; after a good end, once the peers have all their sums."""
        if self._error is None and all(c.waited == c.sent for c in self._courses):
            with suppress(CommError):  # a peer that has gone needs nothing
                self._take_leave()
        with self._changed:
            self._closed = True
        self._window.close()
        self._thread.join()

    def _take_leave(self) -> None:
        """Return once all peers have what they need; until then the thread serves them."""
        window, row = self._window, 3 * len(self._courses)
        peers = [peer for peer in range(window.world_size) if peer != self._place.rank]
        for peer in peers:
            window.put(peer, 0, None, row, 1)
        for peer in peers:
            window.wait(peer, row, 1, limit=self._limit, operation="the end")
            window.flush(peer, limit=self._limit, operation="the end")

    def _course(self, run: Run, templates: Sequence[Tensor], names: Sequence[str]) -> _Course:
        sums = self._place.sums(run)
        views = list(torch.split(sums, list(run.spec.lengths)))
        return _Course(
            run=run,
            sources=Sources(run, templates, names),
            sums=sums,
            views=[like(template, view) for template, view in zip(templates, views, strict=True)],
        )

    def _wait_for_thread(self, course: _Course, version: int, operation: str) -> None:
        def there() -> bool:
            return course.done >= version or self._error is not None

        with self._changed:
            self._changed.wait_for(there, self._limit)
            if course.done >= version:
                return
            if self._error is not None:
                raise self._error
        raise CommTimeout(
            f"rank {self._place.rank} waited {self._limit:g} s for the others' parts in "
            f"{operation}: a rank hangs, can't be reached, or needs a longer --timeout."
        )

    def _wait_for_flags(self, index: int, version: int, operation: str) -> None:
        place, row = self._place, 2 * len(self._courses) + index
        teller = place.leaders[0] if place.rank == place.leader else place.leader
        if teller != place.rank:
            self._window.wait(teller, row, version, limit=self._limit, operation=operation)

    def _work(self) -> None:
        news = 0
        try:
            while not self._closed:
                while self._advance():
                    pass
                news = self._window.wait_for_news(news, _PATIENCE_S)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _advance(self) -> bool:
        """Do what can be done, the most urgent first; return False if there was nothing."""
        place, values, count = self._place, self._window.values, len(self._courses)
        if place.channel is None:
            return False
        advanced = False
        parts = _least(values, place.neighbours, 0, count)
        crossed = _least(values, list(place.across.values()), 0, count)
        back = _least(values, list(place.across.values()), count, 2 * count)
        for course in reversed(self._courses):
            index = course.run.index
            if course.gathered < min(course.sent, parts[index]):
                self._gather(course)
                advanced = True
            if course.summed < min(course.gathered, crossed[index]):
                self._sum(course)
                advanced = True
            if course.done < course.summed and (
                _lands_in_sums(course.run) or course.done < back[index]
            ):
                self._finish(course)
                advanced = True
        if place.rank == place.leader != place.leaders[0]:
            self._tell_flags(values[place.leaders[0], 2 * count : 3 * count])
        return advanced

    def _gather(self, course: _Course) -> None:
        """Add up what the group has of this rank's slice."""
        run, place, part = course.run, self._place, course.part
        assert part is not None
        assert place.channel is not None
        values = run.channel(place.channel)
        if not place.neighbours:
            course.ours, course.weight, course.flags = part.within(values), part.weight, part.flags
        else:
            rooms = [
                None if peer == place.rank else place.local_room(run, place.rank, peer)
                for peer in place.members
            ]
            size = values.stop - values.start
            total = torch.empty(size, dtype=run.spec.dtype) if place.across else course.sums[values]
            parts = [part.within(values) if r is None else [(0, size, r[1])] for r in rooms]
            add_up(parts, [part.weight if r is None else 1.0 for r in rooms], total)
            course.ours, course.weight = [(0, size, total)], 1.0
            flags = [part.flags if r is None else read_head(r[0], run)[1] for r in rooms]
            course.flags = _union(flags)
        if place.across and (place.neighbours or not run.spec.raw):
            self._put_shards(run, course.ours, course.weight, course.flags, course.gathered + 1)
        course.gathered += 1

    def _put_shards(
        self, run: Run, pieces: Sequence[Piece], weight: float, flags: Tensor, version: int
    ) -> None:
        """Put what the group has of the other groups' shards to their owners."""
        place = self._place
        assert place.channel is not None
        first = run.channel(place.channel).start
        for group, owner in place.across.items():
            shard = run.shard(place.channel, group)
            inside = cut(pieces, slice(shard.start - first, shard.stop - first))
            head = torch.zeros(run.head, dtype=torch.uint8)
            write_head(head, weight, flags)
            sources = [head, *(piece for _, _, piece in inside)]
            self._window.put(owner, run.cross[place.group], sources, run.index, version, -run.index)

    def _sum(self, course: _Course) -> None:
        """Add up what the groups have of this rank's shard, and send it back."""
        run, place = course.run, self._place
        assert place.channel is not None
        assert course.flags is not None
        version = course.summed + 1
        if place.across:
            first, shard = run.channel(place.channel).start, run.shard(place.channel, place.group)
            own = course.sums[shard]
            parts, weights, flags = [], [], []
            for group in place.groups:
                if group == place.group:
                    parts.append(cut(course.ours, slice(shard.start - first, shard.stop - first)))
                    weights.append(course.weight)
                    flags.append(course.flags)
                else:
                    head, data = place.cross_room(run, group)
                    weight, used = read_head(head, run)
                    parts.append([(0, len(own), data.view(run.spec.dtype))])
                    weights.append(weight)
                    flags.append(used)
            add_up(parts, weights, own)
            course.flags = _union(flags)
            row = len(self._courses) + run.index
            direct = _lands_in_sums(run)
            for peer in place.across.values():
                where = run.sum_of(shard) if direct else run.back[place.group]
                self._window.put(peer, where, own, row, version, -run.index)
        elif not place.neighbours:
            add_up([course.ours], [course.weight], course.sums)
        if place.rank == place.leaders[0]:
            self._publish_flags(course, version)
        course.summed = version

    def _finish(self, course: _Course) -> None:
        """Put what came from the other groups into the sums, and notify the group."""
        run, place = course.run, self._place
        assert place.channel is not None
        version = course.done + 1
        for group in place.across if not _lands_in_sums(run) else ():
            data = place.back_room(run, group)
            course.sums[run.shard(place.channel, group)].copy_(data.view(run.spec.dtype))
        for peer in place.neighbours:
            row = len(self._courses) + run.index
            self._window.put(peer, 0, None, row, version, -run.index)
        with self._changed:
            course.done = version
            self._changed.notify_all()

    def _publish_flags(self, course: _Course, version: int) -> None:
        """Tell everybody which parameters were used, if somebody didn't use them all."""
        run, place = course.run, self._place
        assert course.flags is not None
        place.flags(run).copy_(course.flags)
        if bool((course.flags == 1).all()):
            return
        row = 2 * len(self._courses) + run.index
        for peer in place.leaders[1:]:
            self._window.put(peer, run.flags, course.flags.clone(), row, version, -run.index)
        for peer in place.neighbours:
            self._window.put(peer, 0, None, row, version, -run.index)

    def _tell_flags(self, versions: NDArray[np.int64]) -> None:
        """Pass flags on to the group."""
        for course, version in zip(self._courses, versions.tolist(), strict=True):
            if version > course.told:
                course.told = version
                row = 2 * len(self._courses) + course.run.index
                for peer in self._place.neighbours:
                    self._window.put(peer, 0, None, row, version, -course.run.index)


def _lands_in_sums(run: Run) -> bool:
    """Tell whether what other groups send back needs no room of its own."""
    return run.back.count == 0


def _least(values: NDArray[np.int64], peers: list[int], start: int, stop: int) -> list[int]:
    """Return what all of some peers have reached, a notification."""
    if not peers:
        return [2**62] * (stop - start)
    least: list[int] = values[peers, start:stop].min(axis=0).tolist()
    return least


def _union(flags: Sequence[Tensor]) -> Tensor:
    """Unite flags: 0 where nobody used a parameter, 1 where all did, 2 where some."""
    union = flags[0].clone()
    for more in flags[1:]:
        union[union != more] = 2
    return union
