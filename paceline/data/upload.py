"""From bytes in host memory to normalised floats on the device.

Bytes travel, a quarter of the size of floats, and become (x - mean) / std where they arrive, as
x · scale + offset. On CUDA the copy and the arithmetic run on a side stream, beside the step that
computes at that time; the stream that uses the images waits for them there, no thread does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Upload:
    """Uploader of uint8 images to a device, on which it normalises them.

    Args:
        mean: mean of each channel, in 0..255; a single value is used for all channels.
        std: standard deviation of each channel, in 0..255; a single value is used for all channels.
        channels: number of channels of the images.
        width: width of the images in pixels.
        device: device to which the images are copied.
        channels_last: whether the result is in channels-last memory format.
    """

    def __init__(
        self,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        channels: int,
        width: int,
        device: torch.device,
        channels_last: bool,
    ) -> None:
        self._device = device
        self._channels_last = channels_last
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        means = torch.tensor(mean, dtype=torch.float64).expand(channels)
        stds = torch.tensor(std, dtype=torch.float64).expand(channels)
        with torch.cuda.stream(self._side):  # no stream, no effect
            # A whole row of pixels: broadcasting over 1 or 3 channels alone is ten times slower.
            self._scale = (1 / stds).repeat(width).to(device, torch.float32)
            self._offset = (-means / stds).repeat(width).to(device, torch.float32)

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate host memory from which copies to the device are fast."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._side is not None)

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Bring a batch to the device.

        Args:
            images: uint8, shape (n, height, width, channels).
            labels: int64, shape (n,).

        Returns:
            Images, float32, shape (n, channels, height, width), and labels, both on the device.
        """
        if self._side is None:
            return self._normalized(images.to(self._device)), labels.to(self._device)
        with torch.cuda.stream(self._side):
            bytes_there = images.to(self._device, non_blocking=True)
            result = self._normalized(bytes_there), labels.to(self._device, non_blocking=True)
        user = torch.cuda.current_stream(self._device)
        user.wait_stream(self._side)
        for tensor in result:  # its memory is the side stream's: keep it until the user is through
            tensor.record_stream(user)
        return result

    def _normalized(self, images: Tensor) -> Tensor:
        if images.device.type == "cpu":
            # numpy asks for huge pages: the first touch of 4 KiB pages would cost as much again.
            floats = torch.from_numpy(np.empty(images.shape, np.float32)).copy_(images)
        else:
            floats = images.to(torch.float32)
        rows = floats.view(-1, self._scale.numel())  # rows: (n · height, width · channels)
        rows.mul_(self._scale).add_(self._offset)
        pixels = floats.permute(0, 3, 1, 2)
        return pixels if self._channels_last else pixels.contiguous()
