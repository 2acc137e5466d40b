"""Batches made on the GPU: baseline JPEG by nvJPEG, the rest on the CPU, into the same batch.

    record --baseline JPEG--> JpegDecoder --> planes on the device --+
    record --any other------> SampleMaker --> sample in host memory -+--> make_samples --> batch

A sample has the plan and the random numbers that the CPU gives it. Whatever can't be read, or is
refused by the decoder, goes to the SampleMaker, which makes the sample or names the damage as ever.
Damage that nvJPEG takes without complaint isn't found: broken codes between a file's header and its
end, which libjpeg-turbo reports.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.data.gpu_decode.baseline_jpeg import baseline_size
from paceline.data.gpu_decode.jpeg_decoder import JpegDecoder
from paceline.data.gpu_decode.plan import plan_of
from paceline.data.image.augment import View
from paceline.data.image.jpeg import jpeg_orientation
from paceline.data.order import Indices
from paceline.data.sample_maker import SampleMaker
from paceline.errors import DataError

_PORTION = 2**30  # bytes of decoded pixels at a time: a batch of large photographs has ten times it
_LAUNCHES = 1  # whose kernels may still read their pixels while nvJPEG decodes the next ones


@dataclass(frozen=True)
class GpuBatch:
    """Batch on its device, made on another stream than the one that uses it.

    Attributes:
        images: float32, normalised, shape (n, channels, image_size, image_size).
        labels: int64, shape (n,).
        bad: what is wrong with the records that gave no sample, by their numbers, in their order;
            their places hold a blank image, and the label 0.
        ready: the event after which images and labels are complete; None: they are.
    """

    images: Tensor
    labels: Tensor
    bad: Mapping[int, DataError]
    ready: torch.cuda.Event | None

    def receive(self) -> None:
        """Let the current stream, which is going to use the batch, wait for it."""
        if self.ready is not None:
            user = torch.cuda.current_stream(self.images.device)
            user.wait_event(self.ready)
            for tensor in (self.images, self.labels):  # memory of the other stream
                tensor.record_stream(user)


@dataclass(frozen=True)
class _File:
    """Baseline JPEG file: its sample's place, its bytes, (height, width) as stored, and its plan.

    The plan is in pixels of the image that is upright by EXIF's orientation.
    """

    place: int
    data: bytes
    shape: tuple[int, int]
    orientation: int
    view: View


class GpuBatchDecoder:
    """Decoder of whole batches on a device, used by one thread or by several.

    Args:
        maker: the sample maker, for what the decoder doesn't take.
        mean: mean of each channel, in 0..255; a single value is used for all channels.
        std: standard deviation of each channel, in 0..255; a single value is used for all channels.
        device: device on which the batches are made; a CPU where Triton's interpreter runs.
        jpeg: the decoder of baseline JPEG files.
        channels_last: whether images are in channels-last memory format.
    """

    def __init__(
        self,
        maker: SampleMaker,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        jpeg: JpegDecoder,
        channels_last: bool,
    ) -> None:
        # Triton is there only where a GPU decodes.
        from paceline.data.gpu_decode.kernel import make_samples

        self._make_samples = make_samples
        self._maker = maker
        self._device = device
        self._jpeg = jpeg
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        # Ahead of the training step's kernels, which leave little room on the device.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._decoding = threading.Lock()
        self._read_by_kernels: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()
        scale = 1 / np.broadcast_to(np.asarray(std, np.float64), maker.fill.shape)
        constants = torch.from_numpy(np.stack([scale, -np.asarray(mean) * scale, maker.fill]))
        with torch.cuda.stream(self._stream):  # no stream, no effect
            self._constants = constants.to(device, torch.float32)

    def make(self, epoch: int, records: Indices) -> GpuBatch:
        """Make a batch; the thread waits for nvJPEG, and for the kernels of an earlier batch.

        Args:
            epoch: decides with the records' numbers what is random.
            records: their numbers, shape (n,).
        """
        transform = self._maker.transform
        side = transform.image_size
        labels = self._host_zeros(len(records), dtype=torch.int64)
        numbers = self._maker.numbers(epoch, records)
        files, others = self._read(records, numbers, labels)
        with self._decoding, torch.cuda.stream(self._stream):
            shape = len(records), transform.channels, side, side
            images = torch.empty(shape, device=self._device, memory_format=self._format)
            decoded: list[tuple[Tensor, list[int]]] = []  # pixels and their plans
            for portion in _portions(files, transform.channels):
                self._launch(decoded, images)
                decoded = []
                for file, pixels in zip(portion, self._decode(portion), strict=True):
                    if pixels is None:
                        others.append(file.place)
                    else:
                        plan = plan_of(file.place, pixels, file.orientation, file.view)
                        decoded.append((pixels, plan))
            bad: dict[int, DataError] = {}
            if others:
                others.sort()
                decoded += self._by_cpu(records, numbers, others, labels, bad)
            self._launch(decoded, images)
            labels = labels.to(self._device, non_blocking=True)
            ready = None if self._stream is None else self._stream.record_event()
        return GpuBatch(images, labels, bad, ready)

    def close(self) -> None:
        """Wait until the device has made what was begun."""
        if self._stream is not None:
            self._stream.synchronize()

    def _read(
        self, records: Indices, numbers: list[list[float]], labels: Tensor
    ) -> tuple[list[_File], list[int]]:
        """Read records; write the labels of files to decode, and return these and other places."""
        files: list[_File] = []
        others: list[int] = []
        for place, index in enumerate(records.tolist()):
            try:
                record = self._maker.read(index)
            except DataError:
                others.append(place)
                continue
            image = record.image
            size = baseline_size(image) if isinstance(image, bytes) else None
            if not isinstance(image, bytes) or size is None:
                others.append(place)
                continue
            orientation = jpeg_orientation(image)
            upright = size if orientation < 5 else size[::-1]
            view = self._maker.transform.view(*upright, numbers[place])
            labels[place] = record.label
            files.append(_File(place, image, size[::-1], orientation, view))
        return files, others

    def _decode(self, files: Sequence[_File]) -> list[Tensor | None]:
        """Decode files; None for those that the decoder refuses."""
        self._free_pixels()
        try:
            decoded = self._jpeg.decode([file.data for file in files])
        except RuntimeError:  # of one of them, which isn't named: halve until it stands alone
            if len(files) == 1:
                return [None]
            half = len(files) // 2
            return self._decode(files[:half]) + self._decode(files[half:])
        pairs = zip(files, decoded, strict=True)
        return [pixels if pixels.shape[1:] == file.shape else None for file, pixels in pairs]

    def _free_pixels(self) -> None:
        """Free the pixels of earlier launches but the last one's, once the kernels have read them.

        nvJPEG writes, on a stream of torchvision's, to memory of the current stream's pool, and
        doesn't wait for a kernel that may still read there.
        """
        while len(self._read_by_kernels) > _LAUNCHES:
            read, _ = self._read_by_kernels[0]
            read.synchronize()
            self._read_by_kernels.popleft()

    def _by_cpu(
        self,
        records: Indices,
        numbers: list[list[float]],
        places: list[int],
        labels: Tensor,
        bad: dict[int, DataError],
    ) -> list[tuple[Tensor, list[int]]]:
        """Make samples on the CPU; write labels and what is wrong, return pixels and plans."""
        transform = self._maker.transform
        side = transform.image_size
        host = self._host_zeros(len(places), side, side, transform.channels, dtype=torch.uint8)
        host[:] = torch.from_numpy(self._maker.fill.copy())
        for place, slot in zip(places, host.numpy(), strict=True):
            index = int(records[place])
            try:
                labels[place] = self._maker.write(index, numbers[place], slot)
            except DataError as error:
                bad[index] = error
                labels[place] = 0
        whole = View(box=(0, 0, side, side), size=side)  # no change: all is done
        slots = host.to(self._device, non_blocking=True).permute(0, 3, 1, 2)
        pairs = zip(places, slots, strict=True)
        return [(pixels, plan_of(place, pixels, 1, whole)) for place, pixels in pairs]

    def _launch(self, decoded: Sequence[tuple[Tensor, list[int]]], images: Tensor) -> None:
        """Let the kernel make samples; their pixels are kept until it has read them."""
        if decoded:
            rows = [plan for _, plan in decoded]
            pinned = self._stream is not None
            plans = torch.tensor(rows, dtype=torch.int64, pin_memory=pinned)
            self._make_samples(plans, self._constants, images)
            if self._stream is not None:
                read = torch.cuda.Event(blocking=True)  # the thread that waits for it sleeps
                read.record(self._stream)
                self._read_by_kernels.append((read, [pixels for pixels, _ in decoded]))

    def _host_zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate host memory from which copies to the device don't wait."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self._stream is not None)


def _portions(files: Sequence[_File], channels: int) -> Iterator[list[_File]]:
    """Divide files so that the pixels of each portion fit into `_PORTION` bytes, or are one's."""
    portion: list[_File] = []
    held = 0
    for file in files:
        pixels = file.shape[0] * file.shape[1] * channels
        if portion and held + pixels > _PORTION:
            yield portion
            portion = []
            held = 0
        portion.append(file)
        held += pixels
    if portion:
        yield portion
