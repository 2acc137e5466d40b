"""Loops that train several models, or with several optimizers; as `loops.py`.

paceline launch -n 2 -- python -m tests.harness.library.several_models
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness.library.loops import STEPS, Loop, Results, Tagger, main, network, weights

NOISE = 4


def generator() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Linear(NOISE, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 12)
    ).double()


def critic() -> nn.Module:
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 1)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.999))


def noise(x: Tensor, loop: Loop, number: int) -> Tensor:
    """Return noise for each sample: a function of the step and of the sample's index in it."""
    rank, size = (0, 1) if loop.world is None else (loop.world.rank, loop.world.world_size)
    whole = torch.randn(
        64, NOISE, dtype=torch.float64, generator=torch.Generator().manual_seed(number)
    )
    return whole[rank::size][: len(x)]


def both(first: nn.Module, second: nn.Module) -> Results:
    return {
        **{f"first.{name}": value for name, value in weights(first).items()},
        **{f"second.{name}": value for name, value in weights(second).items()},
    }


def dcgan(loop: Loop) -> Results:
    """PyTorch's example: two backwards of the discriminator, then one of the generator, a step."""
    net_g, net_d = generator(), critic()
    opt_d, opt_g = adam(net_d), adam(net_g)
    loop.bind(net_d, opt_d)
    loop.bind(net_g, opt_g)
    for number in range(STEPS):
        x, _ = loop.batch(number)
        real, fake_label = torch.ones(len(x), 1).double(), torch.zeros(len(x), 1).double()
        with loop.step(x):
            net_d.zero_grad()
            F.binary_cross_entropy_with_logits(net_d(x), real).backward()
            fake = net_g(noise(x, loop, number))
            F.binary_cross_entropy_with_logits(net_d(fake.detach()), fake_label).backward()
            opt_d.step()
            net_g.zero_grad()
            F.binary_cross_entropy_with_logits(net_d(fake), real).backward()
            opt_g.step()
    return both(net_g, net_d)


def generator_first(loop: Loop) -> Results:
    """The generator's pass first: the discriminator's gradients of it are zeroed, in place."""
    net_g, net_d = generator(), critic()
    opt_d, opt_g = adam(net_d), adam(net_g)
    loop.bind(net_g, opt_g)
    loop.bind(net_d, opt_d)
    for number in range(STEPS):
        x, _ = loop.batch(number)
        with loop.step(x):
            opt_g.zero_grad()
            fake = net_g(noise(x, loop, number))
            (-net_d(fake).mean()).backward()
            opt_g.step()
            opt_d.zero_grad(set_to_none=False)
            (net_d(fake.detach()).mean() - net_d(x).mean()).backward()
            opt_d.step()
    return both(net_g, net_d)


def slope_penalty(net: nn.Module, x: Tensor, fake: Tensor) -> Tensor:
    between = (0.3 * x + 0.7 * fake).detach().requires_grad_()
    (slope,) = torch.autograd.grad(net(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).pow(2).mean()


def wgan_gp(loop: Loop) -> Results:
    """The critic trains in each step, the generator in every third."""
    net_g, net_c = generator(), critic()
    opt_g, opt_c = adam(net_g), adam(net_c)
    loop.bind(net_g, opt_g)
    loop.bind(net_c, opt_c)
    for number in range(STEPS):
        x, _ = loop.batch(number)
        with loop.step(x):
            opt_c.zero_grad()
            fake = net_g(noise(x, loop, number)).detach()
            loss = net_c(fake).mean() - net_c(x).mean() + 10 * slope_penalty(net_c, x, fake)
            loss.backward()
            opt_c.step()
            if number % 3 == 2:
                opt_g.zero_grad()
                (-net_c(net_g(noise(x, loop, number + 100))).mean()).backward()
                opt_g.step()
    return both(net_g, net_c)


def alternating(loop: Loop) -> Results:
    """A step's block for each; the critic is frozen in the generator's (CycleGAN's toggles)."""
    net_g, net_c = generator(), critic()
    opt_g, opt_c = adam(net_g), adam(net_c)
    loop.bind(net_g, opt_g)
    loop.bind(net_c, opt_c)
    for number in range(STEPS):
        x, _ = loop.batch(number)
        net_c.requires_grad_(True)
        with loop.step(x):
            opt_c.zero_grad()
            fake = net_g(noise(x, loop, number)).detach()
            (net_c(fake).mean() - net_c(x).mean()).backward()
            nn.utils.clip_grad_norm_(net_c.parameters(), 0.5)
            opt_c.step()
        net_c.requires_grad_(False)
        with loop.step(x):
            opt_g.zero_grad()
            (-net_c(net_g(noise(x, loop, number + 100))).mean()).backward()
            opt_g.step()
    return both(net_g, net_c)


def cycle(loop: Loop) -> Results:
    """Toggles within a step's block, two generators with one optimizer."""
    torch.manual_seed(5)
    there, back, net_d = nn.Linear(12, 12).double(), nn.Linear(12, 12).double(), critic()
    opt_g = torch.optim.Adam(chain(there.parameters(), back.parameters()), lr=0.01)
    opt_d = adam(net_d)
    loop.bind([there, back], opt_g)
    loop.bind(net_d, opt_d)
    for number in range(STEPS):
        x, _ = loop.batch(number)
        with loop.step(x):
            net_d.requires_grad_(False)
            opt_g.zero_grad()
            fake = there(x)
            (F.l1_loss(back(fake), x) - net_d(fake).mean()).backward()
            opt_g.step()
            net_d.requires_grad_(True)
            opt_d.zero_grad()
            (net_d(fake.detach()).mean() - net_d(x).mean()).backward()
            opt_d.step()
    return {**both(there, back), **weights(net_d)}


def actor_and_critic(loop: Loop) -> Results:
    """An actor trained through its critic, whose gradients of that pass are never used."""
    torch.manual_seed(6)
    actor, value = nn.Linear(12, 3).double(), nn.Linear(15, 1).double()
    opt_a, opt_v = adam(actor), adam(value)
    loop.bind(actor, opt_a)
    loop.bind(value, opt_v)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            guess = value(torch.cat([x, actor(x).detach()], dim=1)).squeeze(1)
            opt_v.zero_grad()
            F.mse_loss(guess, y.double()).backward()
            opt_v.step()
        with loop.step(x):
            opt_a.zero_grad()
            (-value(torch.cat([x, actor(x)], dim=1)).mean()).backward()
            opt_a.step()
    return both(actor, value)


def two_optimizers(loop: Loop) -> Results:
    """One for the backbone, and one for the head, of one model."""
    model: Any = network()
    backbone = torch.optim.SGD(model[:3].parameters(), lr=0.1, momentum=0.9)
    head = torch.optim.AdamW(model[3:].parameters(), lr=0.01)
    loop.bind(model, [backbone, head])
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            backbone.step()
            if number % 2:
                head.step()
    return weights(model)


def encoder_and_decoder(loop: Loop) -> Results:
    """One optimizer of two models, one of which is zeroed by its own method."""
    torch.manual_seed(8)
    encoder, decoder = nn.Linear(12, 4).double(), nn.Linear(4, 12).double()
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    loop.bind([encoder, decoder], optimizer)
    for number in range(STEPS):
        x, _ = loop.batch(number)
        with loop.step(x):
            encoder.zero_grad()
            decoder.zero_grad()
            F.mse_loss(decoder(encoder(x).tanh()), x).backward()
            optimizer.step()
    return both(encoder, decoder)


def joint_backward(loop: Loop) -> Results:
    """One backward for both models; rank 0 alone looks at the second one's gradients first."""
    torch.manual_seed(8)
    encoder, decoder = nn.Linear(12, 4).double(), nn.Linear(4, 12).double()
    opt_e, opt_d = adam(encoder), adam(decoder)
    loop.bind(encoder, opt_e)
    loop.bind(decoder, opt_d)
    norms = []
    for number in range(STEPS):
        x, _ = loop.batch(number)
        with loop.step(x):
            opt_e.zero_grad()
            opt_d.zero_grad()
            F.mse_loss(decoder(encoder(x).tanh()), x).backward()
            if loop.world is None or loop.world.rank == 0:
                norms.append(torch.stack([p.grad.norm() for p in decoder.parameters()]).norm())  # type: ignore[union-attr]
            opt_e.step()
            opt_d.step()
    return {**both(encoder, decoder), **({"norms": torch.stack(norms)} if norms else {})}


def scaled_gan(loop: Loop) -> Results:
    """One loss scaler for both optimizers."""
    net_g, net_d = generator(), critic()
    opt_d, opt_g = adam(net_d), adam(net_g)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    loop.bind(net_d, opt_d)
    loop.bind(net_g, opt_g)
    for number in range(STEPS):
        x, _ = loop.batch(number)
        with loop.step(x):
            opt_d.zero_grad()
            fake = net_g(noise(x, loop, number))
            scaler.scale(net_d(fake.detach()).mean() - net_d(x).mean()).backward()
            scaler.step(opt_d)
            opt_g.zero_grad()
            scaler.scale(-net_d(fake).mean()).backward()
            scaler.unscale_(opt_g)
            nn.utils.clip_grad_norm_(net_g.parameters(), 0.5)
            scaler.step(opt_g)
            scaler.update()
    return both(net_g, net_d)


def averaged_generator(loop: Loop) -> Results:
    """An average of the generator by hand, accumulation, and a scheduler for each optimizer."""
    net_g, net_d = generator(), critic()
    opt_d, opt_g, shadow = adam(net_d), adam(net_g), weights(net_g)
    loop.bind(net_d, opt_d)
    loop.bind(net_g, opt_g)
    rates = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (opt_d, opt_g)]
    for number in range(STEPS):
        x, _ = loop.batch(number, 24)
        with loop.step(x):
            opt_d.zero_grad()
            for part in x.chunk(2):
                with loop.no_sync():
                    (net_d(part).pow(2).sum() / len(x)).backward()
            opt_d.step()
            opt_g.zero_grad()
            (-net_d(net_g(noise(x, loop, number))).mean()).backward()
            opt_g.step()
        with torch.no_grad():
            for name, p in net_g.named_parameters():
                shadow[name].lerp_(p, 0.1)
        for rate in rates:
            rate.step()
    return {**both(net_g, net_d), **shadow}


def without_samples(loop: Loop) -> Results:
    """In every second step only rank 0 has a sample; the others run no forward or backward."""
    net_g, net_d = generator(), critic()
    opt_d, opt_g = adam(net_d), adam(net_g)
    loop.bind(net_d, opt_d)
    loop.bind(net_g, opt_g)
    for number in range(STEPS):
        x, _ = loop.batch(number, 14 if number % 2 else 1)
        with loop.step(x):
            opt_d.zero_grad()
            if len(x):
                (net_d(net_g(noise(x, loop, number)).detach()) - net_d(x)).mean().backward()
            opt_d.step()
        with loop.step(x):
            opt_g.zero_grad()
            if len(x):
                (-net_d(net_g(noise(x, loop, number)))).mean().backward()
            opt_g.step()
    return both(net_g, net_d)


class Both(nn.Module):
    """A generator and a critic in one module, which itself isn't called."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.judge = generator(), critic()


def one_module(loop: Loop) -> Results:
    """Two optimizers of one module, whose parts are called by themselves."""
    gan = Both()
    opt_m, opt_j, shadow = adam(gan.make), adam(gan.judge), weights(gan)
    loop.bind(gan, [opt_m, opt_j])
    for number in range(STEPS):
        x, _ = loop.batch(number)
        with loop.step(x):
            opt_j.zero_grad()
            fake = gan.make(noise(x, loop, number))
            (gan.judge(fake.detach()).mean() - gan.judge(x).mean()).backward()
            opt_j.step()
        with loop.step(x):
            gan.zero_grad()
            (-gan.judge(gan.make(noise(x, loop, number))).mean()).backward()
            opt_m.step()
        with torch.no_grad():
            for name, p in gan.named_parameters():
                shadow[name].lerp_(p, 0.1)
    return {**weights(gan), **{f"shadow.{name}": value for name, value in shadow.items()}}


def two_losses(loop: Loop) -> Results:
    """One model and optimizer, two backward passes in each step."""
    model = network()
    optimizer = adam(model)
    loop.bind(model, optimizer)
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            (0.1 * model(x + 1).pow(2).mean()).backward()
            optimizer.step()
    return weights(model)


def table_and_layers(loop: Loop) -> Results:
    """SparseAdam for a table of words, and Adam for the layers behind it."""
    torch.manual_seed(5)
    model = Tagger().double()
    layers = [*model.lstm.parameters(), *model.out.parameters()]
    of_table = torch.optim.SparseAdam(model.words.parameters(), lr=0.05)
    of_layers = torch.optim.Adam(layers, lr=0.01)
    loop.bind(model, [of_table, of_layers])
    for number in range(STEPS):
        x, y = loop.batch(number)
        with loop.step(x):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            of_table.step()
            of_layers.step()
    return weights(model)


LOOPS: dict[str, Callable[[Loop], Results]] = {
    loop.__name__: loop
    for loop in (
        *(dcgan, generator_first, wgan_gp, alternating, cycle, actor_and_critic, two_optimizers),
        *(encoder_and_decoder, joint_backward, scaled_gan, averaged_generator, two_losses),
        *(without_samples, one_module, table_and_layers),
    )
}


if __name__ == "__main__":
    main(LOOPS)
