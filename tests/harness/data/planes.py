"""The decoder of JPEG files that stands in for nvJPEG: libjpeg-turbo's pixels, as planes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from paceline.data.source import Pixels


def decoded(file: bytes, channels: int) -> Pixels:
    """All pixels of a file as it is stored, by the slow and exact upsampling of colour."""
    pixels = simplejpeg.decode_jpeg(file, colorspace="GRAY" if channels == 1 else "RGB")
    return np.asarray(pixels)


class PlaneDecoder:
    """Decodes on the CPU; keeps how many files each call had."""

    def __init__(self, channels: int) -> None:
        self._channels = channels
        self.calls: list[int] = []

    def decode(self, files: Sequence[Tensor]) -> list[Tensor]:
        self.calls.append(len(files))
        try:
            images = [decoded(file.numpy().tobytes(), self._channels) for file in files]
        except ValueError as error:
            raise RuntimeError("Failed to decode batch: 2") from error
        return [torch.from_numpy(image.transpose(2, 0, 1).copy()) for image in images]
