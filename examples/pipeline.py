"""Train a transformer in stages, each in a process, or on a machine, of its own.

    paceline launch -n 2 -- python examples/pipeline.py --run runs/pipeline
    paceline launch -n 4 -- python examples/pipeline.py --stages 2

The second line trains two replicas of two stages each. The model learns to write Python, byte by
byte, on the standard library's own sources; nothing is downloaded. Embedding and head share their
weight, which the first and the last stage have.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

SYMBOLS = 128  # bytes of ASCII


class Embedding(nn.Module):
    """Embedding of bytes and of their places."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(SYMBOLS, width)
        self.places = nn.Embedding(length, width)

    def forward(self, text: Tensor) -> Tensor:
        """Map (batch, length) to (batch, length, width)."""
        hidden: Tensor = self.bytes(text) + self.places.weight[: text.shape[1]]
        return hidden


class Layer(nn.TransformerEncoderLayer):
    """Layer in which no byte attends to later ones."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        length = hidden.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(
            length, device=hidden.device, dtype=hidden.dtype
        )
        return super().forward(hidden, src_mask=mask, is_causal=True)


def transformer(width: int, layers: int, length: int) -> nn.Sequential:
    """Make blocks that run one after the other: embedding, layers, head."""
    embedding = Embedding(width, length)
    nn.init.normal_(embedding.bytes.weight, std=width**-0.5)
    head = nn.Linear(width, SYMBOLS)
    head.weight = embedding.bytes.weight
    blocks = [Layer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(layers)]
    return nn.Sequential(embedding, *blocks, nn.LayerNorm(width), head)


def loss_of(scores: Tensor, text: Tensor) -> Tensor:
    """Return the mean loss in nats a byte of scores, (batch, length, SYMBOLS)."""
    return F.cross_entropy(scores.flatten(0, 1), text.flatten())


def windows(files: list[Path], length: int) -> TensorDataset:
    """Return texts and, for each of their bytes, the one behind it."""
    text = bytes(byte for path in files for byte in path.read_bytes() if byte < SYMBOLS)
    count = (len(text) - 1) // length
    symbols = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    x = symbols[: count * length].view(count, length)
    return TensorDataset(x, symbols[1 : count * length + 1].view(count, length))


def main() -> None:
    """Train, evaluate on held-out files, and save the whole model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", help="folder of the run")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--files", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--save", help="file for the whole model's weights")
    options = parser.parse_args()

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[: options.files]
    data = windows(files[1:], options.length)
    world = paceline.join(options.run, mesh={"stage": options.stages})
    torch.manual_seed(0)
    with paceline.deferred_init():  # each stage gets its own values alone
        whole = transformer(options.width, options.layers, options.length)
    model = paceline.stages(
        whole,
        world,
        loss=loss_of,
        microbatches=options.microbatches,
        schedule=options.schedule,
        example=data[: options.batch][0],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = paceline.parallelize(model, optimizer, world)
    train = paceline.loader(data, options.batch, world)

    held_out = windows(files[:1], options.length)
    for epoch in range(train.epoch, options.epochs):
        for x, y in train:
            with world.step():
                loss = model.train_batch(x.to(world.device), y.to(world.device))
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of all stages
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        scores = model(held_out.tensors[0].to(world.device))
        test = loss_of(scores, held_out.tensors[1].to(world.device)).item()
        model.train()
        if world.rank == 0:
            bits = (value / math.log(2) for value in (loss.item(), test))
            print("epoch {}: {:.4f} bits a byte, held out {:.4f}".format(epoch, *bits), flush=True)
    state = model.whole_state_dict()
    if options.save and world.rank == 0:
        torch.save(state, options.save)


if __name__ == "__main__":
    main()
