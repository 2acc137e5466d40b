"""A script that trains two divided models, and compares its shards with plain torch on whole ones.

    python -m tests.harness.library.tensor_script SYNC[-kill] CASE …

A case is a number of `CASES`. With "-kill", rank 3 kills itself in step 2.
Each process prints the largest difference of each training.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F

import paceline
from tests.harness.library.small_training import (
    BATCH,
    SEED,
    adamw,
    copied,
    samples,
    sgd,
    trained_alone,
)

EPOCHS = 1
CLIP = 0.3
WIDTH = 8
HEADS = 4


class Attention(nn.Module):
    """Self-attention with a Linear for each projection, of as many heads as it has here."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, length, WIDTH) to the same shape."""
        parts = (self.query(hidden), self.key(hidden), self.value(hidden))
        heads = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        result: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return result


class Layer(nn.Module):
    """Layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.before = nn.LayerNorm(WIDTH)
        self.between = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, length, WIDTH) to the same shape."""
        hidden = hidden + self.attention(self.before(hidden))
        result: Tensor = hidden + self.down(F.gelu(self.up(self.between(hidden))))
        return result


class Transformer(nn.Module):
    """Classifier of sequences of 6 numbers, which are rounded to symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(16, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 6) to (batch, 3)."""
        symbols = (4 * x).long() % 16
        result: Tensor = self.head(self.layers(self.symbols(symbols)).mean(1))
        return result


def perceptron() -> nn.Module:
    """Make a perceptron."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


Plan = dict[str, "str | ParallelStyle"]
PERCEPTRON: Plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
TRANSFORMER: Plan = {
    "symbols": "colwise_rep",
    **{f"layers.*.attention.{name}": "colwise" for name in ("query", "key", "value")},
    "layers.*.attention.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}


CASES: list[tuple[Callable[[], nn.Module], Plan, Callable[[nn.Module], torch.optim.Optimizer]]] = [
    (perceptron, PERCEPTRON, adamw),
    (perceptron, PERCEPTRON, sgd),
    (Transformer, TRANSFORMER, adamw),
]


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model in float64, the same at each call."""
    torch.manual_seed(4)
    return make().double()


def distance(shards: Mapping[str, Tensor], whole: Mapping[str, Tensor], rank: int) -> float:
    """Return the largest difference of values in shards of two from those of whole parameters."""
    parts = {name: _part(whole[name], shard, rank) for name, shard in shards.items()}
    return max((shards[name] - part).abs().max().item() for name, part in parts.items())


def _part(whole: Tensor, shard: Tensor, rank: int) -> Tensor:
    """Return what a shard of two should have of a whole."""
    for dim, (size, own) in enumerate(zip(whole.shape, shard.shape, strict=True)):
        if size != own:
            return whole.chunk(2, dim)[rank]
    return whole


def main() -> None:
    """Train some cases, one world each, as one process."""
    given, *cases = sys.argv[1:]
    way, _, kills = given.partition("-")
    for make, plan, make_optimizer in (CASES[int(case)] for case in cases):
        with paceline.join(seed=SEED, timeout=30, mesh={"tensor": 2}) as world:
            model = made(make)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(world.rank)  # must not matter: rank 0's are broadcast
            whole = sum(p.numel() for p in model.parameters())
            early = make_optimizer(model)
            paceline.tensor_parallel(model, world, plan)
            optimizer = make_optimizer(model)
            with suppress(paceline.ConfigError):
                paceline.parallelize(model, early, world, sync=way)
                raise AssertionError("an optimizer of the whole model was taken")
            paceline.parallelize(model, optimizer, world, sync=way)
            loader = paceline.loader(samples(), BATCH, world)
            for _ in range(EPOCHS):
                for x, y in loader:
                    with world.step():
                        if kills and (world.generation, world.rank, loader.step) == (0, 3, 2):
                            os.kill(os.getpid(), signal.SIGKILL)
                        F.cross_entropy(model(x), y).backward()
                        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                        optimizer.step()
                        optimizer.zero_grad()
            shards = copied(model)
            rank = world.coordinate("tensor")
        alone = made(make)
        expected = trained_alone(alone, make_optimizer(alone), EPOCHS, clip=CLIP)
        assert expected.keys() == shards.keys()
        far = distance(shards, expected, rank)
        share = sum(shard.numel() for shard in shards.values()) / whole
        print(f"{make.__name__} {make_optimizer.__name__}: {share:.2f}, {far:.1e} off", flush=True)


if __name__ == "__main__":
    main()
