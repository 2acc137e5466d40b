"""Batches made on the GPU: baseline JPEG by nvJPEG, the rest by the CPU, into the same batch.

    buffer of FileMaker --files----> JpegDecoder --> planes on the device --+
                      --samples--> copied to the device ------------------+--> make_samples

A sample has the plan and the random numbers that the CPU gives it. What nvJPEG refuses goes to the
SampleMaker, which makes the sample or names the damage as ever. Damage that nvJPEG takes without
complaint isn't found: broken codes between a file's header and its end, which libjpeg-turbo
reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.data.decoding.ring import BatchBuffer
from paceline.data.gpu_decode.file_maker import (
    FILE,
    HEADER,
    HEIGHT,
    KIND,
    LENGTH,
    NOTHING,
    PLAN,
    SAMPLE,
    WIDTH,
    headers_of,
)
from paceline.data.gpu_decode.jpeg_decoder import JpegDecoder
from paceline.data.gpu_decode.plan import plan_of
from paceline.data.image.augment import View
from paceline.data.sample_maker import SampleMaker
from paceline.errors import DataError

_SUB_BATCH = 2**30  # bytes of decoded pixels at a time; large photographs have ten times it
_LAUNCHES = 1  # whose kernels may still read their pixels while nvJPEG decodes the next ones


@dataclass(frozen=True)
class GpuBatch:
    """Batch on its device, made on another stream than the one that uses it.

    Attributes:
        images: float32, normalised, shape (n, channels, image_size, image_size).
        labels: int64, shape (n,).
        bad: what is wrong with records whose files were refused and gave no sample either, by
            their numbers; their label is 0.
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


class KeptPixels:
    """Pixels that kernels may still read.

    nvJPEG writes, on a stream of torchvision's, to memory of the current stream's pool, and doesn't
    wait for a kernel there that still reads what was freed.
    """

    def __init__(self) -> None:
        self._launches: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()

    def keep(self, pixels: list[Tensor], stream: torch.cuda.Stream) -> None:
        """Keep the pixels of a kernel that was launched on a stream."""
        read = torch.cuda.Event(blocking=True)  # the thread that waits for it sleeps
        read.record(stream)
        self._launches.append((read, pixels))

    def free(self) -> None:
        """Free the pixels of all launches but the last one, once they have been read."""
        while len(self._launches) > _LAUNCHES:
            read, _ = self._launches[0]
            read.synchronize()
            self._launches.popleft()


class GpuBatchDecoder:
    """Decoder of whole batches on a device, used by one thread.

    Args:
        maker: the sample maker, for what the decoder refuses.
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
        self._kept = KeptPixels()
        scale = 1 / np.broadcast_to(np.asarray(std, np.float64), maker.fill.shape)
        constants = torch.from_numpy(np.stack([scale, -np.asarray(mean) * scale, maker.fill]))
        with torch.cuda.stream(self._stream):  # no stream, no effect
            self._constants = constants.to(device, torch.float32)

    def make(self, epoch: int, buffer: BatchBuffer) -> GpuBatch:
        """Make a batch; the thread waits for nvJPEG, and for the kernels of an earlier batch.

        Args:
            epoch: decides with the records' numbers what is random.
            buffer: what a `FileMaker` has made of the records.
        """
        transform = self._maker.transform
        side = transform.image_size
        headers = headers_of(buffer.samples)
        plans = headers[:, PLAN].copy()
        plans[:, 0] = np.arange(len(buffer))
        by_cpu = np.flatnonzero(headers[:, KIND] == SAMPLE).tolist()
        labels = self._host_zeros(len(buffer), dtype=torch.int64)
        labels.numpy()[:] = buffer.labels
        with torch.cuda.stream(self._stream):
            shape = len(buffer), transform.channels, side, side
            images = torch.empty(shape, device=self._device, memory_format=self._format)
            for sub_batch in self._sub_batches(headers):
                kept: list[Tensor] = []
                places: list[int] = []
                pixels = self._decode([_file(buffer, headers, place) for place in sub_batch])
                for place, each in zip(sub_batch, pixels, strict=True):
                    size = headers[place, HEIGHT], headers[place, WIDTH]
                    if each is None or each.shape[1:] != size or not each.is_contiguous():
                        by_cpu.append(place)
                        continue
                    plans[place, 1] += each.data_ptr()
                    kept.append(each)
                    places.append(place)
                self._launch(plans[places], kept, images)
            bad: dict[int, DataError] = {}
            if by_cpu:
                self._by_cpu(epoch, buffer, sorted(by_cpu), labels, bad, images)
            for place in np.flatnonzero(headers[:, KIND] == NOTHING).tolist():
                images[place] = 0
            labels = labels.to(self._device, non_blocking=True)
            ready = None if self._stream is None else self._stream.record_event()
        return GpuBatch(images, labels, bad, ready)

    def close(self) -> None:
        """Wait until the device has made what was begun."""
        if self._stream is not None:
            self._stream.synchronize()

    def _sub_batches(self, headers: npt.NDArray[np.int64]) -> Iterator[list[int]]:
        """Divide the places of files so that the pixels of a sub-batch fit, or are one's."""
        channels = self._maker.transform.channels
        sub_batch: list[int] = []
        held = 0
        for place in np.flatnonzero(headers[:, KIND] == FILE).tolist():
            pixels = int(headers[place, HEIGHT] * headers[place, WIDTH]) * channels
            if sub_batch and held + pixels > _SUB_BATCH:
                yield sub_batch
                sub_batch = []
                held = 0
            sub_batch.append(place)
            held += pixels
        if sub_batch:
            yield sub_batch

    def _decode(self, files: Sequence[Tensor]) -> list[Tensor | None]:
        """Decode files; None for those that the decoder refuses."""
        self._kept.free()
        try:
            return [*self._jpeg.decode(files)]
        except RuntimeError:  # of one of them, which isn't named: halve until it stands alone
            if len(files) == 1:
                return [None]
            half = len(files) // 2
            return self._decode(files[:half]) + self._decode(files[half:])

    def _by_cpu(
        self,
        epoch: int,
        buffer: BatchBuffer,
        places: list[int],
        labels: Tensor,
        bad: dict[int, DataError],
        images: Tensor,
    ) -> None:
        """Bring samples of the CPU into the batch, and make those of files that were refused."""
        transform = self._maker.transform
        side = transform.image_size
        length = self._maker.sample_bytes
        host = self._host_zeros(len(places), length, dtype=torch.uint8)
        made = headers_of(buffer.samples)[:, KIND] == SAMPLE
        numbers = self._maker.numbers(epoch, buffer.records[places])
        for at, place in enumerate(places):
            slot = host.numpy()[at]
            if made[place]:
                slot[:] = buffer.samples[place, HEADER : HEADER + length]
                continue
            record = int(buffer.records[place])
            try:
                self._maker.write(record, numbers[at], slot)
            except DataError as error:
                bad[record] = error
                labels[place] = 0
        whole = View(box=(0, 0, side, side), size=side)  # no change: all is done
        strides = (1, side * transform.channels, transform.channels)
        plans = np.tile(plan_of(strides, (side, side), 1, whole), (len(places), 1))
        plans[:, 0] = places
        pixels = host.to(self._device, non_blocking=True)
        plans[:, 1] += pixels.data_ptr() + length * np.arange(len(places))
        self._launch(plans, [pixels], images)

    def _launch(self, plans: npt.NDArray[np.int64], pixels: list[Tensor], images: Tensor) -> None:
        """Let the kernel make samples; their pixels are kept until it has read them."""
        if not len(plans):
            return
        table = torch.from_numpy(plans)
        if self._stream is not None:
            table = table.pin_memory()
        self._make_samples(table, self._constants, images)
        if self._stream is not None:
            self._kept.keep(pixels, self._stream)

    def _host_zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate host memory from which copies to the device don't wait."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self._stream is not None)


def _file(buffer: BatchBuffer, headers: npt.NDArray[np.int64], place: int) -> Tensor:
    """Return a file in its buffer, uint8 of shape (bytes,)."""
    return torch.from_numpy(buffer.samples[place, HEADER : HEADER + int(headers[place, LENGTH])])
