"""Made-up histories of runs, written as event files, and what they trained by plain counting.

    history = RunHistory(samples=10, batch=4, epochs=2)
    history.start(world=2, start_step=0, end_steps=[3, 4], saved=[2])   # rank 1: one step further
    history.kill(torn=[1])                                              # in the middle of a line
    history.start(world=1, start_step=2, end_steps=[6], ended=True)

It shares nothing with the tested code but the format of a line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Key = tuple[int, int, int]  # machine; member's number; the start that made the file, -1 for all


@dataclass(kw_only=True)
class RunHistory:
    """A run of `epochs` epochs of `samples` samples, `batch` a step.

    Attributes:
        broken: positions whose records can't be read, in each epoch.
        by_member: each member has a file, whose lines have all shares; otherwise, as in earlier
            versions, each rank has one, whose lines tell its own. It may change between two starts.
        files: the lines of each machine's files; a torn one ends without a line's end.
        trained: how often each position of each step that counts was trained.
        generation: number of the last generation.
        began: the generation in which its members began.
        end_steps: the step before which each of its ranks ended.
        saved: the checkpoints from which a later generation may resume.
        committed: steps that must have been trained, by what the files say.
    """

    samples: int
    batch: int
    epochs: int
    broken: frozenset[int] = frozenset()
    by_member: bool = True
    files: dict[Key, list[str]] = field(default_factory=dict)
    trained: dict[int, Counter[int]] = field(default_factory=dict)
    generation: int = -1
    began: int = -1
    end_steps: Sequence[int] = ()
    saved: list[int] = field(default_factory=list)
    committed: int = 0

    @property
    def steps(self) -> int:
        return (self.samples + self.batch - 1) // self.batch

    @property
    def total(self) -> int:
        return self.steps * self.epochs

    @property
    def done(self) -> int:
        """Steps that all ranks of the last generation passed."""
        return min(self.end_steps)

    def start(
        self,
        *,
        world: int,
        start_step: int,
        end_steps: Sequence[int],
        saved: Iterable[int] = (),
        checkpoint_logged: bool = True,
        ended: bool = False,
        origin: str | None = None,
        local: int = 99,
        members: Sequence[int] | None = None,
    ) -> None:
        """Start the run anew, with `local` ranks a machine.

        Args:
            world: ranks.
            start_step: the first step of this generation.
            end_steps: the step before which each rank ends.
            saved: before which steps checkpoints are published.
            checkpoint_logged: the event of the last checkpoint was written before the end.
            ended: the run ends with this generation.
            origin: the checkpoint was another run's.
            local: ranks a machine.
            members: the members of the start before that go on, in rank order, by their numbers; by
                default all are new.
        """
        self.generation += 1
        self.began = self.generation if members is None else self.began
        began = self.began if self.by_member else -1
        numbers = range(world) if members is None else members
        self.end_steps = end_steps
        self.saved = sorted({s for s in self.saved if s <= start_step} | {start_step, *saved})
        events = [step for step in self.saved if step > start_step]
        events = events if checkpoint_logged else events[:-1]
        self.committed = self.total if ended else max([start_step, *events])
        for step in [step for step in self.trained if step >= start_step]:
            del self.trained[step]
        for rank, number in enumerate(numbers):
            lines = self.files.setdefault((number // local, number, began), [])
            if lines and not lines[-1].endswith("\n"):
                lines.pop()  # as the writer did
            lines.extend(
                self._lines(rank, numbers, start_step, events if rank == 0 else [], origin)
            )
            if ended:
                lines.append(_line(event="end", generation=self.generation))

    def kill(self, *, torn: Iterable[int] = ()) -> None:
        """End some ranks in the middle of a line; which is the last one of their files."""
        for (_, number, _), lines in self.files.items():
            if number in torn and lines[-1].endswith("\n"):
                lines.append('{"event": "step", "generation": 0, "st')

    def lines(self, number: int = 0, began: int = 0) -> list[str]:
        """Return the lines of a member, or of a rank in earlier versions, on whatever machine."""
        wanted = number, began if self.by_member else -1
        (found,) = (lines for key, lines in self.files.items() if key[1:] == wanted)
        return found

    def lose(self, number: int, began: int = 0) -> None:
        """Remove the file of a member."""
        self.files = {key: text for key, text in self.files.items() if key[1:] != (number, began)}

    def write(self, folder: Path) -> list[tuple[str, Path]]:
        """Write the files; return each member's, the first ones first."""
        written = []
        for machine, number, began in sorted(self.files, key=lambda key: key[1:]):
            name = f"rank{number}" if began < 0 else member_id(began, number)
            path = folder / f"machine{machine}" / f"events.{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(self.files[machine, number, began]))
            written.append((f"rank {number}" if began < 0 else f"member {name}", path))
        return written

    def counts(self, epoch: int) -> tuple[int, int]:
        """Count an epoch's samples below `done` that were trained once, and those left out."""
        once = skipped = 0
        for step in range(epoch * self.steps, min((epoch + 1) * self.steps, self.done)):
            for position, times in self.trained[step].items():
                assert times == 1
                skipped += position in self.broken
                once += position not in self.broken
        return once, skipped

    def share(self, step: int, rank: int, world: int) -> tuple[int, int]:
        """Divide a batch into contiguous slices; the first ranks may get one sample more."""
        first = step % self.steps * self.batch
        positions = range(first, min(first + self.batch, self.samples))
        sizes = [len(positions[r::world]) for r in range(world)]
        begin = first + sum(sizes[:rank])
        return begin, begin + sizes[rank]

    def _lines(
        self,
        rank: int,
        members: Sequence[int],
        start_step: int,
        saved: Sequence[int],
        origin: str | None,
    ) -> Iterator[str]:
        number, world = self.generation, len(members)
        size: dict[str, Any] = {"samples": self.samples, "steps": self.steps}
        size |= {"epochs": self.epochs, "batch": self.batch, "world_size": world, "machines": 1}
        if self.by_member:
            size["members"] = [member_id(self.began, member) for member in members]
        yield _line(event="run", generation=number, rank=rank, **size, model="m", device="cpu")
        yield _line(event="restore", generation=number, step=start_step, origin=origin)
        yield _line(event="note", text="Good luck")
        for step in range(start_step, self.end_steps[rank]):
            yield self._step(step, rank, world)
            if rank == 0:
                yield _line(event="loss", generation=number, step=step, loss=0.5)
            if step + 1 in saved:
                yield _line(event="checkpoint", generation=number, step=step + 1, path="x.pt")

    def _step(self, step: int, rank: int, world: int) -> str:
        first, last = self.share(step, rank, world)
        self.trained.setdefault(step, Counter()).update(range(first, last))
        begins = [self.share(step, each, world)[0] for each in range(world)]
        end = self.share(step, world - 1, world)[1]
        told = {"cuts": [*begins, end]} if self.by_member else {}
        return _line(
            event="step",
            generation=self.generation,
            step=step,
            epoch=step // self.steps,
            first=first,
            last=last,
            **told,
            skipped=len(self.broken & set(range(first, last))),
        )


def member_id(began: int, number: int) -> str:
    """Return a member's id."""
    return f"{began:012x}-{number}"


def _line(**fields: Any) -> str:
    return json.dumps(fields) + "\n"
