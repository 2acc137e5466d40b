"""The codec of sums that return as they are, while contributions are encoded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.codecs.codec import MultiPassCodec, Source
from tests.harness.reference.plain import weighed


class Unencoded(MultiPassCodec):
    """float32 values as they are; nothing is lost."""

    def size(self, numel: int) -> int:
        """See `Codec`."""
        return 4 * numel

    def encode(
        self, sources: Sequence[Source], weight: float, before: Tensor, data: Tensor, after: Tensor
    ) -> None:
        """See `Codec`."""
        codes = data.view(torch.float32)
        for begin, values in weighed(sources, weight, before):
            codes[begin : begin + len(values)] = values
            after[begin : begin + len(values)] = 0

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See `Codec`."""
        values = data.view(torch.float32)
        if add:
            out += values
        else:
            out.copy_(values)
