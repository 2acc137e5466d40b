"""The table of codecs for merges: what encodes changes of weights, and the sums that return.

A change since the last merge is much larger than a gradient's rounding, and merges are rare. So
they take coarser codecs than `--wire` has for gradients. Error feedback sends the rest later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from paceline.codecs.codec import Codec
from paceline.codecs.codecs import CODECS
from paceline.codecs.kernels.compiled_int4 import Int4
from paceline.codecs.kernels.compiled_topk import TopK
from paceline.errors import ConfigError, Message

MERGE_CODECS: Mapping[str, Codec | None] = {**CODECS, "int4": Int4()}
_LARGEST = Fraction(1, 2)  # of a chunk's values: beyond, int4 is smaller and more precise
_BLOCK = 2**16  # values, by which sizes are compared


def merge_codec(text: str) -> Codec | None:
    """Return the codec of merges that a text names; None: changes travel as they are.

    Args:
        text: a name of `MERGE_CODECS`, or "topk:FRACTION" or "topk:FRACTION:BITS".

    Raises:
        ConfigError: there is no such codec.
    """
    if text in MERGE_CODECS:
        return MERGE_CODECS[text]
    kind, *values = text.split(":")
    if kind != "topk" or not 1 <= len(values) <= 2:
        names = ", ".join(MERGE_CODECS)
        raise ConfigError(
            Message(
                "{--wire} {} is not a codec of merges; choose one of {}, or topk with the fraction "
                "of the values to send, as in topk:0.02.",
                text,
                names,
            )
        )
    bits = values[1] if len(values) == 2 else "2"
    if bits not in ("2", "4"):
        raise ConfigError(
            Message(
                "{--wire} {} asks for values of {} bits, but topk has 2 or 4; set topk:{}:4, or "
                "leave the bits out for 2.",
                text,
                bits or "no",
                values[0],
            )
        )
    return TopK(fraction=_fraction(text, values[0]), bits=int(bits))


def return_codec(codec: Codec | None, groups: int) -> Codec | None:
    """Return the codec of the sums that owners send back, given that of contributions.

    A sum of topk contributions has up to `groups` times as many nonzero values, and the owner's own
    contribution is complete. So the sums of topk take that fraction and 4 bits, or int4 where that
    is smaller. Others return as they came.

    Args:
        codec: of contributions.
        groups: how many groups contribute.
    """
    if not isinstance(codec, TopK):
        return codec
    fraction = min(codec.fraction * groups, _LARGEST)
    wider = TopK(fraction=fraction, bits=4)
    int4 = MERGE_CODECS["int4"]
    assert int4 is not None
    return wider if wider.size(_BLOCK) < int4.size(_BLOCK) else int4


def _fraction(text: str, fraction: str) -> Fraction:
    """Parse the fraction in a codec's text."""
    if re.fullmatch(r"\d+\.?\d*|\.\d+", fraction, re.ASCII) and 0 < Fraction(fraction) <= _LARGEST:
        return Fraction(fraction)
    raise ConfigError(
        Message(
            "{--wire} {} asks for {} of the values, but topk sends a fraction above 0 and at most "
            "0.5; set topk:0.02, for example.",
            text,
            fraction or "no part",
        )
    )
