"""A small GAN on a loader's batches: in one step's block a batch, or in one for each model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.api.world import World
from tests.harness.library.small_training import BATCH, samples

SAMPLES = 57  # the last batch has 9
Act = Callable[[World, str], None]


@dataclass(frozen=True, kw_only=True)
class Gan:
    """A way to train the GAN.

    Attributes:
        blocks: 1 or 2, of `world.step()` a batch.
        every: the generator trains at each so many batches.
        arguments: of `paceline.parallelize`, of both.
        norm: both have BatchNorms.
        together: both are given in one call, with a list of two optimizers.
        epochs: how many.
        noisy: it has random noise and dropout, which depend on the number of ranks.
    """

    blocks: int = 1
    every: int = 1
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"sync": "allreduce"})
    norm: bool = True
    together: bool = False
    epochs: int = 3
    noisy: bool = True

    def networks(self) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(4)
        norm = nn.BatchNorm1d if self.norm else nn.LayerNorm
        make = nn.Sequential(nn.Linear(4, 8), norm(8), nn.ReLU(), nn.Linear(8, 6)).double()
        judge = nn.Sequential(
            nn.Linear(6, 8), norm(8), nn.Tanh(), nn.Dropout(0.3 * self.noisy), nn.Linear(8, 1)
        )
        return make, judge.double()

    def train(
        self, world: World, act: Act = lambda world, where: None
    ) -> tuple[dict[int, float], dict[str, Tensor]]:
        """Train; return the loss of each batch, and the state of models and optimizers.

        Args:
            world: the world, which has no model yet.
            act: called with the world and the place in the loop.
        """
        make, judge = self.networks()
        opt_m = torch.optim.Adam(make.parameters(), lr=0.01, betas=(0.5, 0.9))
        opt_j = torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.9)
        if self.together:
            paceline.parallelize([judge, make], [opt_j, opt_m], world, **self.arguments)
        else:
            paceline.parallelize(judge, opt_j, world, **self.arguments)
            paceline.parallelize(make, opt_m, world, **self.arguments)
        rate = torch.optim.lr_scheduler.ExponentialLR(opt_m, 0.98)
        world.track(rate)
        loader = paceline.loader(samples(SAMPLES), BATCH, world)
        losses = {}
        while loader.epoch < self.epochs:
            for x, _ in loader:
                act(world, "batch")
                number, trains = world.steps, loader.step % self.every == self.every - 1
                with world.step() as step:
                    act(world, "begin")
                    opt_j.zero_grad()
                    fake = make(self.noise(x))
                    loss = judged(judge, x, 1.0)
                    loss.backward()
                    judged(judge, fake.detach(), 0.0).backward()
                    act(world, "backward")
                    opt_j.step()
                    act(world, "update")
                    if trains and self.blocks == 1:
                        deceive(make, judge, opt_m, fake)
                        act(world, "both")
                if trains and self.blocks == 2:
                    act(world, "between")
                    with world.step():
                        act(world, "second")
                        judge.requires_grad_(False)
                        deceive(make, judge, opt_m, make(self.noise(x)))
                        act(world, "both")
                    judge.requires_grad_(True)
                if step.done:
                    losses[number] = loss.item()
                if trains:
                    rate.step()
        world.settle()
        return losses, state_of(make, judge, opt_m, opt_j, whole=self.whole)

    def noise(self, x: Tensor) -> Tensor:
        """Return the generator's input for a batch, (samples, 4)."""
        return torch.randn(len(x), 4).double() if self.noisy else x[:, :4]

    @property
    def whole(self) -> bool:
        """Whether each rank has the optimizers' whole state."""
        return self.arguments.get("update") != "sharded"


def judged(judge: nn.Module, x: Tensor, label: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(judge(x), torch.full((len(x), 1), label).double())


def deceive(
    make: nn.Module, judge: nn.Module, optimizer: torch.optim.Optimizer, fake: Tensor
) -> None:
    optimizer.zero_grad()
    judged(judge, fake, 1.0).backward()
    optimizer.step()


def state_of(
    make: nn.Module,
    judge: nn.Module,
    opt_m: torch.optim.Optimizer,
    opt_j: torch.optim.Optimizer,
    *,
    whole: bool,
) -> dict[str, Tensor]:
    state = {
        f"{prefix}.{name}": value.clone()
        for prefix, model in (("make", make), ("judge", judge))
        for name, value in model.state_dict().items()
    }
    if whole:
        for name, p in make.named_parameters():
            state[f"exp_avg of {name}"] = opt_m.state[p]["exp_avg"].clone()
        for name, p in judge.named_parameters():
            state[f"momentum of {name}"] = opt_j.state[p]["momentum_buffer"].clone()
    return state


def train_in(
    run: Path | None, gan: Gan, act: Act = lambda world, where: None, **options: Any
) -> Any:
    """Train in a world of its own; as `Gan.train`."""
    with paceline.join(run, **options) as world:
        return gan.train(world, act)
