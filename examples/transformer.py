"""Train a small transformer to write Python, on the standard library's own sources.

    paceline launch -n 2 -- python examples/transformer.py --run runs/transformer

Byte by byte, with dropout, AdamW, a schedule of warm-up and cosine, gradients accumulated over
parts of a batch, and clipped. Nothing is downloaded. The same command again goes on where it was
stopped; in the end rank 0 writes a line of what it has learned.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import paceline

SYMBOLS = 128  # bytes of ASCII


class Windows(Dataset[Tensor]):
    """All windows of `length` + 1 bytes of some files, one after the other."""

    def __init__(self, files: list[Path], length: int) -> None:
        text = b"".join(path.read_bytes() for path in files)
        plain = bytes(byte for byte in text if byte < SYMBOLS)
        self._text = torch.frombuffer(bytearray(plain), dtype=torch.uint8)
        self._length = length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> Tensor:
        first = index * self._length
        return self._text[first : first + self._length + 1].long()


class Transformer(nn.Module):
    """A decoder that predicts each next byte."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(SYMBOLS, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores, (batch, length, SYMBOLS), for the bytes after those of `text`."""
        length = text.shape[1]
        hidden = self.bytes(text) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        scores: Tensor = self.head(hidden)
        return scores


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss of a batch of windows, in nats a byte."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, windows: Tensor, world: paceline.World
) -> Tensor:
    """Make a step in two parts, so that only half the activations are kept at a time."""
    with world.step():
        *first, last = windows.chunk(2)
        total = torch.zeros((), device=world.device)
        for part in first:
            with world.no_sync():  # its gradient waits for the last part's
                total += backward(model, part, len(windows))
        total += backward(model, last, len(windows))
        world.reduce()  # now each .grad is the mean over the global batch
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return total


def backward(model: nn.Module, part: Tensor, samples: int) -> Tensor:
    """Run backward from a part's share of a batch's loss."""
    loss = loss_of(model, part) * len(part) / samples
    loss.backward()
    return loss.detach()


@torch.no_grad()
def written(model: nn.Module, start: str, count: int, length: int) -> str:
    """Let the model go on from `start`, always with the likeliest byte."""
    text = torch.tensor([list(start.encode())], device=next(model.parameters()).device)
    for _ in range(count):
        best = model(text[:, -length:])[:, -1].argmax(-1, keepdim=True)
        text = torch.cat([text, best], dim=1)
    return bytes(text[0].tolist()).decode()


def main() -> None:
    """Train, evaluate on held-out files, and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", help="folder of the run")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--files", type=int, default=150)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[: options.files]
    world = paceline.join(options.run)
    torch.manual_seed(0)
    model = Transformer(options.width, options.layers, options.length).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    paceline.parallelize(model, optimizer, world)
    held_out = files[::10]
    data = Windows([path for path in files if path not in held_out], options.length)
    train = paceline.loader(data, options.batch, world)
    test = paceline.loader(Windows(held_out, options.length), options.batch, world, train=False)
    steps, warmup = options.epochs * len(train), 20
    schedule = LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
    )
    world.track(schedule)

    for epoch in range(train.epoch, options.epochs):
        for windows in train:
            train_step(model, optimizer, windows.to(world.device), world)
            schedule.step()
        model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for windows in world.evaluation(test):
                loss = loss_of(model, windows.to(world.device)).item()
                sums += torch.tensor([loss * len(windows), len(windows)], dtype=torch.float64)
        loss, seen = world.total(sums).tolist()
        model.train()
        if world.rank == 0:
            print(f"epoch {epoch}: {loss / seen / math.log(2):.4f} bits a byte", flush=True)
    model.eval()
    if world.rank == 0:
        print(written(model, "def main(", 60, options.length))


if __name__ == "__main__":
    main()
