"""Loops that people have, each in plain torch and on all ranks; prints how far they are apart.

    python -m tests.harness.library.loops PLAIN
    paceline launch -n 2 -- python -m tests.harness.library.loops PLAIN

A loop is written once. On all ranks it has three more lines: `join`, `parallelize`, and `step`
around a step. Each rank prints each loop's name and the largest difference from plain torch on the
whole batch, in float64. Its results are in the file PLAIN, which the first call writes.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline

BATCH, STEPS = 14, 6
Results = Mapping[str, Tensor]


@dataclass
class Loop:
    """What a loop needs: its part of each batch, and the lines that differ on several ranks."""

    world: paceline.World | None = None
    sync: str = "allreduce"

    def bind(self, model: Any, optimizer: Any) -> None:
        if self.world is not None:
            paceline.parallelize(model, optimizer, self.world, sync=self.sync)

    def batch(self, number: int, count: int = BATCH) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(count, 12, dtype=torch.float64, generator=generator)
        y = torch.randint(0, 5, (count,), generator=generator)
        if self.world is None:
            return x, y
        own = slice(self.world.rank, None, self.world.world_size)
        return x[own], y[own]

    @contextmanager
    def step(self, x: Tensor) -> Iterator[None]:
        if self.world is None:
            yield
        else:
            with self.world.step(samples=len(x)):
                yield

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext() if self.world is None else self.world.no_sync()

    def reduce(self) -> None:
        if self.world is not None:
            self.world.reduce()

    def settle(self) -> None:
        if self.world is not None:
            self.world.settle()

    def mean(self, value: Tensor, x: Tensor) -> Tensor:
        """Return a mean over the global batch."""
        if self.world is None:
            return value
        sums = self.world.total(torch.stack([value.detach() * len(x), torch.tensor(float(len(x)))]))
        return sums[0] / sums[1]


def network() -> nn.Module:
    torch.manual_seed(7)
    first = (nn.Linear(12, 16), nn.Tanh(), nn.LayerNorm(16))
    return nn.Sequential(*first, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain(loop: Loop) -> Results:
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return weights(model)


def average_by_hand(loop: Loop) -> Results:
    model = network()
    optimizer, shadow = sgd(model), weights(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for name, p in model.named_parameters():
                shadow[name].lerp_(p, 0.1)
    return shadow


def averaged_model(loop: Loop) -> Results:
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
    return weights(average)


def best_copy(loop: Loop) -> Results:
    """Keep a copy of the best model so far, and stop early."""
    model = network()
    optimizer, best, copied = sgd(model), torch.tensor(torch.inf).double(), {}
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loss = loop.mean(loss, x)
        if loss < best:
            best, copied = loss, weights(copy.deepcopy(model))
        if number > 3 and loss > best:
            break
    return copied


def clipped_norm(loop: Loop) -> Results:
    model = network()
    optimizer, norms = sgd(model), []
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
    return {**weights(model), "norms": torch.stack(norms)}


def clipped_value(loop: Loop) -> Results:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def scaled(loop: Loop) -> Results:
    model = network()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            if number % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return weights(model)


def scaled_without_samples(loop: Loop) -> Results:
    """Scale, also in steps in which rank 0 alone has a sample, and in one whose loss overflows."""
    model = network()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    loop.bind(model, optimizer)
    scales = []
    for number in range(2 * STEPS):
        x, y = loop.batch(number, BATCH if number % 3 else 1)
        factor = torch.inf if number in (3, 7) else 1.0
        with loop.step(x):
            optimizer.zero_grad()
            if len(x):
                scaler.scale(factor * F.cross_entropy(model(x), y)).backward()
            if number % 2 == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        scales.append(torch.tensor(scaler.get_scale()))
    return {**weights(model), "scales": torch.stack(scales)}


def skipped_by_gradients(loop: Loop) -> Results:
    """Leave a step out whose gradients aren't finite, by one sample of one rank."""
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    skipped = []
    for number in range(STEPS):
        x, y = loop.batch(number)
        weight = torch.full((len(x),), torch.nan) if number == 3 else torch.ones(len(x))
        weight[1:] = 1
        if loop.world is not None and loop.world.rank:
            weight[:] = 1
        with loop.step(x):
            (F.cross_entropy(model(x), y, reduction="none") * weight).mean().backward()
            skipped.append(not all(p.grad.isfinite().all() for p in model.parameters()))
            if not skipped[-1]:
                optimizer.step()
            optimizer.zero_grad()
    assert skipped == [number == 3 for number in range(STEPS)]
    return weights(model)


class Lookahead:
    """Slow weights by the fast ones of an optimizer that this one wraps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        self.fast = [p for group in inner.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.fast]

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, fast in zip(self.slow, self.fast, strict=True):
                fast.copy_(slow.lerp_(fast, 0.5))


def wrapped_optimizer(loop: Loop) -> Results:
    """Step by a wrapper, of which `parallelize` gets the inner optimizer."""
    model = network()
    optimizer = Lookahead(sgd(model))
    loop.bind(model, optimizer.inner)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            model.zero_grad()
    return weights(model)


def assigned_gradients(loop: Loop) -> Results:
    """Assign gradients without a backward, and clip them where they are the means."""
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            output, own = model(x), list(model.parameters())
            first = torch.autograd.grad(F.cross_entropy(output, y), own, retain_graph=True)
            second = torch.autograd.grad(output.square().mean(), own)
            for p, one, other in zip(own, first, second, strict=True):
                p.grad = one + 0.5 * other
            if number % 2:
                loop.reduce()
                nn.utils.clip_grad_norm_(own, 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


class LaterReads(nn.Module):
    """A model that uses its last layer's weight before that layer runs, from some call on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = network(), nn.Linear(5, 5).double()
        self.early = False

    def forward(self, x: Tensor) -> Tensor:
        factor = 1 + 0.1 * self.head.weight.sum() if self.early else 1.0
        output: Tensor = self.head(self.body(x)) * factor
        return output


def read_later(loop: Loop) -> Results:
    """Read a parameter in later steps, where `world.settle()` comes before the forward."""
    torch.manual_seed(7)
    model = LaterReads()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        model.early = number > 2
        with loop.step(x):
            loop.settle()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def logged_gradients(loop: Loop) -> Results:
    """Log the gradients' norm on one rank, after the step."""
    model = network()
    optimizer, norms = sgd(model), []
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if loop.world is None or loop.world.rank == 0:
            norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm())  # type: ignore[union-attr]
    return {**weights(model), **({"norms": torch.stack(norms)} if norms else {})}


def clamped_weights(loop: Loop) -> Results:
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)
    return weights(model)


def weight_penalty(loop: Loop) -> Results:
    """A penalty on parameters that the loss adds outside of the model."""
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            penalty = torch.stack([p.abs().sum() for p in model.parameters()]).sum()
            (F.cross_entropy(model(x), y) + 1e-3 * penalty).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def gradient_penalty(loop: Loop) -> Results:
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            x = x.clone().requires_grad_()
            loss = F.cross_entropy(model(x), y, reduction="none")
            (slope,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
            (loss.mean() + slope.pow(2).sum(1).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


class SharpnessAware(torch.optim.Optimizer):
    """Foret et al. 2021: two steps around another optimizer, as the common implementation."""

    def __init__(self, parameters: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad, alpha=group["rho"] / float(norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def sharpness_aware(loop: Loop) -> Results:
    model = network()
    optimizer = SharpnessAware(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            optimizer.first_step()
            F.cross_entropy(model(x), y).backward()
            optimizer.second_step()
    return weights(model)


def two_backward_passes(loop: Loop) -> Results:
    """Two losses, the first one's gradient scaled by hand before the second's is added."""
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(0.5)
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def accumulated(loop: Loop) -> Results:
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number, 24)
        with loop.step(x):
            *parts, last = zip(x.chunk(3), y.chunk(3), strict=True)
            for part in parts:
                with loop.no_sync():
                    F.cross_entropy(model(part[0]), part[1], reduction="sum").div(len(x)).backward()
            F.cross_entropy(model(last[0]), last[1], reduction="sum").div(len(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def frozen_then_unfrozen(loop: Loop) -> Results:
    model: Any = network()
    optimizer = sgd(model)
    model[0].requires_grad_(False)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        if number == STEPS // 2:
            model[0].requires_grad_(True)
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def frozen_by_turns(loop: Loop) -> Results:
    """The first layer is frozen at the end of every other block, that of the first step too."""
    model: Any = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            model[0].requires_grad_(number % 2 == 1)
    return weights(model)


class LowRank(nn.Module):
    """A frozen layer with a trained low-rank addition (Hu et al. 2021)."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, inner.in_features).double())
        self.up = nn.Parameter(torch.zeros(inner.out_features, 2).double())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) + x @ self.down.t() @ self.up.t()
        return y


def low_rank(loop: Loop) -> Results:
    model: Any = network()
    torch.manual_seed(3)
    for index in (0, 3, 5):
        model[index] = LowRank(model[index])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def normed_later(loop: Loop) -> Results:
    """Add spectral norms between steps, each with random buffers, which differ between ranks."""
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        torch.manual_seed(number if loop.world is None else number + loop.world.rank)
        if number == 2:
            nn.utils.parametrizations.spectral_norm(model[3])
        if number == 4:
            nn.utils.spectral_norm(model[5])
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {**weights(model), **{name: b.clone() for name, b in model.named_buffers()}}


def distillation(loop: Loop) -> Results:
    teacher, model = network().eval().requires_grad_(False), nn.Linear(12, 5).double()
    nn.init.constant_(model.weight, 0.1)
    nn.init.zeros_(model.bias)
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, _ = loop.batch(number)
        with loop.step(x):
            with torch.no_grad():
                expected = teacher(x).softmax(1)
            F.kl_div(model(x).log_softmax(1), expected, reduction="batchmean").backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def mixup(loop: Loop) -> Results:
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        (x, y), (u, v) = loop.batch(number), loop.batch(number + 100)
        share = (number + 1) / (STEPS + 2)
        with loop.step(x):
            out = model(share * x + (1 - share) * u)
            (share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, v)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def curriculum(loop: Loop) -> Results:
    """Batches that grow."""
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number, 5 + 3 * number)
        with loop.step(x):
            F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def two_schedulers(loop: Loop) -> Results:
    model: Any = network()
    groups = [{"params": model[:3].parameters()}, {"params": model[3:].parameters(), "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    loop.bind(model, optimizer)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        warm.step()
        decay.step()
    return weights(model)


def closure(loop: Loop) -> Results:
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)

        def loss(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(model(x), y)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return value

        with loop.step(x):
            optimizer.step(loss)  # type: ignore[arg-type]
    return weights(model)


def noisy_gradients(loop: Loop) -> Results:
    """Noise on the gradients, the same on all ranks (Neelakantan et al. 2015)."""
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            generator = torch.Generator().manual_seed(number)
            for p in model.parameters():
                assert p.grad is not None
                p.grad += 0.01 * torch.randn(p.shape, dtype=p.dtype, generator=generator)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def never_zeroed(loop: Loop) -> Results:
    """Gradients that add up over all steps, with shares that change."""
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number, 5 + 3 * number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    sums = {f"gradient {name}": p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    return {**weights(model), **sums}


def stepped_every_other_batch(loop: Loop) -> Results:
    """Gradients that add up over two steps, of which only the second updates."""
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number, 5 + 3 * number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


def averaged_then_zeroed(loop: Loop) -> Results:
    """An average of weights before the gradients are zeroed, and one after the forward."""
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for number in range(STEPS):
        x, y = loop.batch(number, 5 + 3 * number)
        with loop.step(x):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        average.update_parameters(model)
    return weights(average)


def forward_mode(loop: Loop) -> Results:
    """A penalty on a directional derivative, by forward-mode differentiation."""
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            out, slope = torch.func.jvp(model, (x,), (torch.ones_like(x),))
            (F.cross_entropy(out, y) + slope.pow(2).sum(1).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def dual_numbers(loop: Loop) -> Results:
    """The same by dual numbers."""
    model = network()
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            with forward_ad.dual_level():
                dual = model(forward_ad.make_dual(x, torch.ones_like(x)))
                out, slope = forward_ad.unpack_dual(dual)
                (F.cross_entropy(out, y) + slope.pow(2).sum(1).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def traced_twin(loop: Loop) -> Results:
    """A traced twin that shares the model's parameters, and that trains them."""
    model = network()
    twin = torch.jit.trace(model, torch.randn(4, 12).double())  # type: ignore[no-untyped-call]
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(twin(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


class Tagger(nn.Module):
    """A table of words with sparse gradients before an LSTM; a sentence is a batch's 12 values."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 8, sparse=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.lstm(self.words((40 * x).long() % 200))[0][:, -1])
        return y


def sparse_words(loop: Loop) -> Results:
    torch.manual_seed(5)
    model = Tagger().double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def sparse_words_clipped(loop: Loop) -> Results:
    """Clip all gradients by their norm, that of the table by its rows, and log it."""
    torch.manual_seed(5)
    model, norms = Tagger().double(), []
    optimizer = sgd(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            F.cross_entropy(model(x), y).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            rows = [g.coalesce().values() if g.is_sparse else g for g in gradients]
            norms.append(torch.stack([values.norm() for values in rows]).norm())
            for gradient in gradients:
                gradient.mul_(0.5 / norms[-1])
            optimizer.step()
            optimizer.zero_grad()
    return {**weights(model), "norms": torch.stack(norms)}


LOOPS: dict[str, Callable[[Loop], Results]] = {
    loop.__name__: loop
    for loop in (
        *(plain, average_by_hand, averaged_model, best_copy, clipped_norm, clipped_value, scaled),
        *(scaled_without_samples, skipped_by_gradients, wrapped_optimizer),
        *(assigned_gradients, read_later),
        *(logged_gradients, clamped_weights, weight_penalty, gradient_penalty, sharpness_aware),
        *(two_backward_passes, accumulated, frozen_then_unfrozen, low_rank, normed_later),
        *(distillation, mixup, frozen_by_turns),
        *(curriculum, two_schedulers, closure, noisy_gradients, sparse_words, sparse_words_clipped),
        *(never_zeroed, stepped_every_other_batch, averaged_then_zeroed),
        *(forward_mode, dual_numbers, traced_twin),
    )
}


def sync_of(number: int, ranks: int) -> str:
    """Return a loop's method: two ranks and three together meet both, for half the processor time.

    A loop's code runs in the hooks that both methods have; numbers of ranks and methods with one
    another are the equivalence grid's (`tests/contract/test_equivalence.py`).
    """
    return ("allreduce", "notified")[(number + ranks) % 2]


def main(loops: Mapping[str, Callable[[Loop], Results]] = LOOPS) -> None:
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    if not path.exists():
        torch.save({name: loop(Loop()) for name, loop in loops.items()}, path)
        return
    plain = torch.load(path, weights_only=True)
    for number, (name, loop) in enumerate(loops.items()):
        world = paceline.join(timeout=20)
        sync, rank = sync_of(number, world.world_size), world.rank
        found = loop(Loop(world, sync))
        expected = plain[name]
        world.close()
        assert found.keys() <= expected.keys(), name
        errors = [float((found[key] - expected[key]).abs().max()) for key in found]
        print(f"rank {rank} {name} {sync} {max(errors):.3g}", flush=True)


if __name__ == "__main__":
    main()
