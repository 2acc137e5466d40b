"""The table of codecs by `--wire`."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.codecs.codec import Codec
from paceline.codecs.kernels.compiled import Bf16, Int8

CODECS: Mapping[str, Codec | None] = {  # None: values travel as they are
    "fp32": None,
    "bf16": Bf16(),
    "int8": Int8(),
}
