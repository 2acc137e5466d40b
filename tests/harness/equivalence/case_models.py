"""Models of the equivalence grid, for images (n, 3, 8, 8) and 10 classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness.equivalence.large_batch import convnet


class Attention(nn.Module):
    """Reads `out_proj` without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        y: Tensor = self.head(self.attention(tokens, tokens, tokens)[0].mean(1))
        return y


class Tied(nn.Module):
    """Reads one weight twice, by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(192, 10, bias=False)
        self.again = nn.Linear(192, 10, bias=False)
        self.again.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        y: Tensor = self.inner(flat) + self.again(flat.tanh())
        return y


class CalledTwice(nn.Module):
    """Calls one module several times."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(192, 10)
        self.again = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.again(self.again(self.inward(x.flatten(1)).tanh()).tanh())
        return y


class Unused(nn.Module):
    """Has a layer that nobody uses, and one that only later steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(192, 10)
        self.never = nn.Linear(3, 3)
        self.later = nn.Linear(10, 10)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.used(x.flatten(1))
        return y + self.later(y) if self.calls > 3 else y


class Alternating(nn.Module):
    """Goes another way in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(192, 10)
        self.ways = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10), nn.Identity()])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.ways[self.calls % 3](self.first(x.flatten(1)))
        return y


class WithTemperature(nn.Module):
    """A layer whose outputs a parameter scales that isn't the model's, but the optimizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 10)
        self.outside: list[nn.Parameter] = [nn.Parameter(torch.ones(1, dtype=torch.float64))]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.flatten(1)) * self.outside[0]
        return y


def frozen_convnet() -> nn.Module:
    """A net whose middle is frozen."""
    model = convnet()
    for index in (2, 3):
        model[index].requires_grad_(False)  # type: ignore[index]
    return model


def normalised() -> nn.Module:
    """A convolutional net with batch statistics."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8, momentum=0.3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 16, 10),
    )


class AllNorms(nn.Module):
    """BatchNorms of one to three dimensions, with and without what is optional."""

    def __init__(self) -> None:
        super().__init__()
        self.plane = nn.BatchNorm2d(3, momentum=None)
        self.volume = nn.BatchNorm3d(1, affine=False)
        self.line = nn.SyncBatchNorm(3, track_running_stats=False)
        self.inner = nn.Linear(192, 6)
        self.vector = nn.BatchNorm1d(6)
        self.frozen = nn.BatchNorm1d(6).eval()
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.volume(self.plane(x).unsqueeze(1)).squeeze(1)
        x = self._line(x.flatten(2))
        y: Tensor = self.head(self.frozen(self.vector(self.inner(x.flatten(1)))).relu())
        return y

    def _line(self, x: Tensor) -> Tensor:
        if isinstance(self.line, nn.SyncBatchNorm):  # which refuses CPUs: plain, in one process
            return nn.functional.batch_norm(
                x, None, None, self.line.weight, self.line.bias, training=True
            )
        y: Tensor = self.line(x)
        return y


class Checkpointed(nn.Module):
    """Computes two segments' activations again in backward."""

    def __init__(self, *, use_reentrant: bool = False) -> None:
        super().__init__()
        self.net = convnet()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[0](x)  # type: ignore[index]
        x = checkpoint(self.net[1:5], x, use_reentrant=self.use_reentrant)  # type: ignore[index]
        y: Tensor = checkpoint(self.net[5:], x, use_reentrant=self.use_reentrant)  # type: ignore[index]
        return y


class CheckpointedNorms(nn.Module):
    """Computes batch statistics again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = normalised()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.net[:5], x, use_reentrant=False)  # type: ignore[index]
        y: Tensor = self.net[5:](x)  # type: ignore[index]
        return y
