"""The table of codecs by `--wire`, and the weighted sum: compiled by numba, or plain torch.

`kernels/compiled.py` and `kernels/plain.py` have the same classes and functions, and give the same
bits. Without numba the plain ones run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor

from paceline.codecs.codec import Codec, Piece


class WeightedSum(Protocol):
    """Protocol of a weighted sum of contributions, which runs with the GIL released."""

    def __call__(
        self,
        parts: Sequence[Sequence[Piece]],
        weights: Sequence[float],
        out: Tensor,
        *,
        past_caches: bool = False,
    ) -> None:
        """Write ((w0 * p0 + w1 * p1) + w2 * p2) + … to `out`, each step rounded.

        Args:
            parts: contributions of out's floating dtype; the pieces of each cover `out`, and
                overlap it nowhere.
            weights: one a contribution; with 0 it is left out, whatever it holds.
            out: flat and contiguous.
            past_caches: another core, or a much later step, reads the sum, so it bypasses this
                core's caches.
        """


_kernels: Any = import_module(
    f"paceline.codecs.kernels.{'plain' if find_spec('numba') is None else 'compiled'}"
)

add_up: WeightedSum = _kernels.add_up
CODECS: Mapping[str, Codec | None] = {  # None: values travel as they are
    "fp32": None,
    "bf16": _kernels.Bf16(),
    "int8": _kernels.Int8(),
}
