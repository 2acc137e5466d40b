"""The seam to nvJPEG: from files in host memory to planes on the device."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor


class JpegDecoder(Protocol):
    """Protocol of a decoder of baseline JPEG files."""

    def decode(self, files: Sequence[Tensor]) -> list[Tensor]:
        """Decode files, each uint8 of shape (bytes,), in host memory.

        Returns:
            An image for each: uint8, shape (channels, height, width), on the device, ready for the
            current stream; an EXIF orientation isn't applied. Its memory may be reused at once
            when it is freed: not before the device has read it.

        Raises:
            RuntimeError: one of them can't be decoded.
        """


class TorchvisionDecoder:
    """JPEG decoder by nvJPEG, through torchvision, to grey (1 channel) or RGB (3) on a device."""

    def __init__(self, *, channels: int, device: torch.device) -> None:
        self._io: Any = import_module("torchvision.io")
        modes = self._io.ImageReadMode
        self._mode = modes.GRAY if channels == 1 else modes.RGB
        self._device = device

    def decode(self, files: Sequence[Tensor]) -> list[Tensor]:
        images: list[Tensor] = self._io.decode_jpeg(
            list(files), mode=self._mode, device=self._device
        )
        return images
