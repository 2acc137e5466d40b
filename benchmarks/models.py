"""Models that the zoo doesn't have, in plain torch: a VGG-16, a word model of LSTMs, a small GPT.

Their layers are unlike a ResNet's. Most of VGG-16's bytes are in its last layers, which are read
last. The word model's are in its first and its last layer, the GPT's alike in all blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 1000  # of images
VGG16_CHANNELS = ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3)
VOCABULARY = {"lstm": 10_000, "gpt": 2048}


class VGG16(nn.Sequential):
    """VGG-16's convolutions for small images, and a smaller classifier: 19 million parameters.

    It takes images, (batch, 3, size, size) with sizes of 32 and more, and returns logits, (batch,
    CLASSES). There is no dropout: all exchanges train the same.
    """

    def __init__(self, hidden: int = 1536) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for block in VGG16_CHANNELS:
            for size in block:
                layers += [nn.Conv2d(channels, size, 3, padding=1), nn.ReLU(inplace=True)]
                channels = size
            layers.append(nn.MaxPool2d(2))
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        layers += [nn.Linear(channels, hidden), nn.ReLU(inplace=True)]
        layers += [nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, CLASSES)]
        super().__init__(*layers)
        for layer in layers:  # torch's default would let the gradients of 16 layers vanish
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")


class WordModel(nn.Module):
    """Language model of words: embedding, two layers of LSTM, untied decoder: 12 million.

    It takes words, (batch, length) of int64, and returns the logits of the next ones, (batch,
    length, vocabulary).
    """

    def __init__(self, vocabulary: int = VOCABULARY["lstm"], size: int = 448) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.lstm = nn.LSTM(size, size, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(size, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(words))
        logits: Tensor = self.decoder(states)
        return logits


class Block(nn.Module):
    """A transformer's block, norms first: causal attention, then two layers with a GELU."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention_in, self.attention_out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp_in, self.mlp_out = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, states: Tensor) -> Tensor:
        states = states + self._attention(self.norm1(states))
        out: Tensor = states + self.mlp_out(functional.gelu(self.mlp_in(self.norm2(states))))
        return out

    def _attention(self, states: Tensor) -> Tensor:
        # (batch, length, 3 size) -> 3 of (batch, heads, length, size / heads), and back
        split = self.attention_in(states).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*split.unbind(), is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return out


class GPT(nn.Module):
    """Decoder-only transformer with six blocks and an untied head: 12 million parameters.

    It takes tokens, (batch, length) of int64, and returns the logits of the next ones, (batch,
    length, vocabulary).
    """

    def __init__(
        self,
        vocabulary: int = VOCABULARY["gpt"],
        length: int = 128,
        size: int = 384,
        blocks: int = 6,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, size), nn.Embedding(length, size)
        self.blocks = nn.Sequential(*(Block(size, size // 64) for _ in range(blocks)))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        states = self.tokens(tokens) + self.positions(positions)
        logits: Tensor = self.head(self.norm(self.blocks(states)))
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {"vgg16": VGG16, "lstm": WordModel, "gpt": GPT}
