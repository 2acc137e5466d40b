"""From bytes in host memory to normalised floats on the device.

Bytes travel, a quarter of the size of floats, and become (x - mean) / std where they arrive, as
x · scale + offset. On CUDA the copy and the arithmetic run on a side stream, beside the step that
computes at that time; the stream that uses the images waits for them there, no thread does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Uploaded:
    """Batch on the device.

    Attributes:
        images: float32, shape (n, channels, height, width).
        labels: int64, shape (n,).
        copied: event after which the device has read the host's memory; None: it has.
    """

    images: Tensor
    labels: Tensor
    copied: torch.cuda.Event | None


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

    def __call__(self, samples: Sequence[tuple[Tensor, Tensor]]) -> Uploaded:
        """Bring a batch to the device.

        Args:
            samples: the batch's parts, each with images, uint8 of shape (m, height, width,
                channels), and labels, int64 of shape (m,); from pinned memory they are copied
                without a wait.
        """
        if self._side is None:
            images, labels = self._normalized(*self._joined(samples))
            return Uploaded(images, labels, None)
        with torch.cuda.stream(self._side):
            parts = self._joined(samples)
            copied = self._side.record_event()
            images, labels = self._normalized(*parts)
        user = torch.cuda.current_stream(self._device)
        # The stream waits, and not the host, which queues the step meanwhile.
        user.wait_stream(self._side)
        for tensor in (images, labels):  # side stream's memory: keep it until the user is through
            tensor.record_stream(user)
        return Uploaded(images, labels, copied)

    def _joined(self, samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Copy parts to the device, behind each other; on a CPU images become floats at once."""
        count = sum(len(labels) for _, labels in samples)
        first, _ = samples[0]
        shape = (count, *first.shape[1:])
        if self._device.type == "cpu":
            # numpy asks for huge pages: the first touch of 4 KiB pages would cost as much again.
            images = torch.from_numpy(np.empty(shape, np.float32))
        else:
            images = torch.empty(shape, dtype=torch.uint8, device=self._device)
        labels = torch.empty(count, dtype=torch.int64, device=self._device)
        at = 0
        for part_images, part_labels in samples:
            part = slice(at, at + len(part_labels))
            images[part].copy_(part_images, non_blocking=True)
            labels[part].copy_(part_labels, non_blocking=True)
            at = part.stop
        return images, labels

    def _normalized(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        floats = images.to(torch.float32)
        rows = floats.view(-1, self._scale.numel())  # rows: (n · height, width · channels)
        rows.mul_(self._scale).add_(self._offset)
        pixels = floats.permute(0, 3, 1, 2)
        return pixels if self._channels_last else pixels.contiguous(), labels
