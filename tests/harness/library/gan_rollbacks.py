"""A GAN whose generations end in mid-step, in all ranks at moments of their own.

    python -m tests.harness.library.gan_rollbacks RANKS FOLDER CASE …

As `rollback_script`: with two ranks it prints the case with "equal" where all bits are, with three
with "close" where all values are. A digest of all bits follows.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import paceline
from paceline.api.world import World
from tests.harness.library.gan import Gan
from tests.harness.library.rollback_script import STEPS, Breaks, Moment, close, digest, parked
from tests.harness.library.successors import Successors

NOTIFIED = {"sync": "notified", "bucket_mb": 1e-4}
CASES = {
    "one block": Gan(),
    "a block each": Gan(blocks=2, every=2),
    "notified": Gan(arguments=NOTIFIED, every=2),
    "one call": Gan(arguments=NOTIFIED, together=True, blocks=2),
    "sharded": Gan(arguments={**NOTIFIED, "update": "sharded"}, norm=False),
}
_OF_BOTH = ("both", "second")
_AT = ("begin", "backward", "update", *_OF_BOTH)


def train(gan: Gan, moments: Sequence[Sequence[Moment]], run: Path | None) -> dict[str, Tensor]:
    """Train; return the final state."""
    world = paceline.join(run, timeout=20)
    generations = Successors(world, *([parked] if world.world_size > 2 else []))
    breaks = Breaks(world, generations, [each[world.rank] for each in moments])

    def act(world: World, where: str) -> None:
        if world._loop.in_step:
            breaks.pass_by(where)

    _, state = gan.train(world, act)
    assert generations.generation == len(moments), "a generation didn't end where it should have"
    world.close()
    return state


def drawn(gan: Gan, seed: int, ranks: int) -> list[list[Moment]]:
    """Draw moments in steps in which the generator trains too."""
    draw = random.Random(seed)
    moments: list[list[Moment]] = []
    for step in (1, STEPS - 2, STEPS + 3, 2 * STEPS + 1):  # an even number: all are in the last one
        both = (step % STEPS) % gan.every == gan.every - 1
        places = [at for at in _AT if both or at not in _OF_BOTH]
        at = draw.choice([at for at in places if gan.blocks == 2 or at != "second"])
        number = step + (gan.blocks == 2 and at in _OF_BOTH)  # in the second block
        others = [draw.choice(_AT[:3]) if at in _AT[:3] else at for _ in range(ranks - 1)]
        moments.append([(number, each) for each in (at, *others)])
    return moments


def main() -> None:
    """Train each case twice, and compare."""
    ranks, folder, *names = sys.argv[1:]
    for number, name in enumerate(names):
        gan = CASES[name] if ranks == "2" else replace(CASES[name], norm=False, noisy=False)
        plain = train(gan, [], None)
        broken = train(gan, drawn(gan, number, int(ranks)), Path(folder, name))
        alike = torch.equal if ranks == "2" else close
        unlike = [key for key in plain if not alike(plain[key], broken[key])]
        answer = "equal" if ranks == "2" else "close"
        print(f"{name}: {unlike or answer} {digest(broken)}", flush=True)


if __name__ == "__main__":
    main()
