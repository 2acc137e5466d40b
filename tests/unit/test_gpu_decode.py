"""Batches with a stand-in for nvJPEG and Triton's interpreter, against the CPU's samples."""

from __future__ import annotations

import io
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from torch import Tensor

from paceline.data.batch_maker import SwitchedBatches
from paceline.data.decoding.decode_pool import DecodeDevice, DecodePool
from paceline.data.decoding.ring import BatchBuffer, Ring
from paceline.data.gpu_decode import decoder as decoder_module
from paceline.data.gpu_decode.baseline_jpeg import baseline_size
from paceline.data.gpu_decode.decoder import GpuBatch, GpuBatchDecoder, KeptPixels
from paceline.data.gpu_decode.device_batches import DecodeThread, DeviceBatches
from paceline.data.gpu_decode.file_maker import FILE, KIND, LENGTH, WIDTH, FileMaker, headers_of
from paceline.data.gpu_decode.jpeg_decoder import TorchvisionDecoder
from paceline.data.gpu_decode.requirements import require_gpu_decoding
from paceline.data.image.augment import Transform
from paceline.data.image.jpeg import jpeg_orientation
from paceline.data.image.pixels import upright
from paceline.data.loader import DatabaseLoader
from paceline.data.order import Indices, Order
from paceline.data.sample_maker import SampleMaker
from paceline.data.source import Pixels, Record
from paceline.errors import ConfigError, DataError
from tests.harness.data.image_folder import put, ramp
from tests.harness.data.loading import CPU, ListSource, host_batches
from tests.harness.data.planes import PlaneDecoder, decoded

SIDE = 12
FILL = (90, 100, 110)
MEAN = (50.0, 60.0, 70.0)
STD = (2.0, 4.0, 8.0)


def _file(pixels: Pixels, kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind, **options)
    return file.getvalue()


def _turned(pixels: Pixels, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return _file(pixels, exif=exif)


def _photographs() -> list[bytes]:
    return [
        _file(ramp(21, 16, seed=1)),
        _file(ramp(9, 14, seed=2), mode="L"),
        _turned(ramp(18, 15, seed=3), 6),
        simplejpeg.encode_jpeg(ramp(22, 22, seed=4), colorsubsampling="444"),
    ]


def _transform(augment: str = "inception", **options: Any) -> Transform:
    return Transform(augment=augment, image_size=SIDE, scale=14, seed=7, **options)  # type: ignore[arg-type]


def _make(
    images: Sequence[bytes | Pixels],
    transform: Transform,
    *,
    num_labels: int | None = None,
    decoder: type[PlaneDecoder] = PlaneDecoder,
) -> tuple[GpuBatch, PlaneDecoder]:
    """A batch of all records, the last one first; labels are ten times the numbers."""
    source = ListSource([Record(image, 10 * at) for at, image in enumerate(images)])
    channels = transform.channels
    planes = decoder(channels)
    maker = SampleMaker(
        source=source,
        transform=transform,
        fill=np.array(FILL[:channels], np.uint8),
        num_labels=num_labels,
    )
    batches = GpuBatchDecoder(
        maker,
        mean=MEAN[:channels],
        std=STD[:channels],
        device=CPU,
        jpeg=planes,
        channels_last=True,
    )
    with _buffer(FileMaker(**vars(maker)), _backwards(images)) as (buffer, bad):
        batch = batches.make(3, buffer)
    batch.receive()
    batches.close()
    return replace(batch, bad={**bad, **batch.bad}), planes


@contextmanager
def _buffer(
    maker: FileMaker, records: Indices
) -> Iterator[tuple[BatchBuffer, dict[int, DataError]]]:
    """What a decode process makes of records, and what is wrong with them."""
    ring = Ring(cuda=False)
    buffer = ring.take(len(records), maker.sample_bytes, pinned=maker.pinned)
    headers_of(buffer.samples)[:, KIND] = FILE  # of an earlier batch
    headers_of(buffer.samples)[:, LENGTH : WIDTH + 1] = 9
    buffer.records[:] = records
    bad: dict[int, DataError] = {}
    for at, numbers in enumerate(maker.numbers(3, records)):
        try:
            buffer.labels[at] = maker.write(int(records[at]), numbers, buffer.samples[at])
        except DataError as error:
            bad[int(records[at])] = error
    yield buffer, bad
    ring.close()


def _backwards(images: Sequence[bytes | Pixels]) -> Indices:
    return np.arange(len(images))[::-1]


def _bytes_of(batch: GpuBatch) -> Pixels:
    """The samples before they were normalised."""
    channels = batch.images.shape[1]
    pixels = batch.images.permute(0, 2, 3, 1).numpy()
    return pixels * np.array(STD[:channels]) + np.array(MEAN[:channels])


def _in_full(image: bytes | Pixels, channels: int) -> bytes | Pixels:
    """What the stand-in decodes, if it does: the CPU lets libjpeg-turbo scale, which differs."""
    if isinstance(image, bytes) and baseline_size(image):
        with suppress(ValueError):
            return upright(decoded(image, channels), jpeg_orientation(image))
    return image


def _by_cpu(
    images: Sequence[bytes | Pixels], transform: Transform
) -> tuple[Pixels, dict[int, DataError]]:
    """The SampleMaker's samples of the same pixels, and what is wrong."""
    fill = np.array(FILL[: transform.channels], np.uint8)
    maker = SampleMaker(
        source=ListSource([Record(_in_full(image, transform.channels), 0) for image in images]),
        transform=transform,
        fill=fill,
        num_labels=None,
    )
    samples = np.tile(fill, (len(images), SIDE, SIDE, 1))
    records = _backwards(images)
    bad = {}
    for index, numbers, slot in zip(records, maker.numbers(3, records), samples, strict=True):
        try:
            maker.write(int(index), numbers, slot)
        except DataError as error:
            bad[int(index)] = error
    return samples, bad


@pytest.mark.parametrize("augment", ["caffe2", "inception", "pad", "none"])
def test_a_batch_is_what_the_cpu_makes_of_the_same_pixels(augment: str) -> None:
    images = _photographs()
    transform = _transform(augment, color_jitter=0.4 if augment == "inception" else 0)
    batch, planes = _make(images, transform)
    samples, _ = _by_cpu(images, transform)
    assert np.abs(_bytes_of(batch) - samples).max() <= (1.01 if transform.color_jitter else 0.01)
    assert batch.labels.tolist() == [30, 20, 10, 0]
    assert planes.calls == [4]
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.ready is None


def test_a_grey_evaluation_batch_is_what_the_cpu_makes_of_the_same_pixels() -> None:
    images = _photographs()
    transform = _transform(channels=1, train=False)
    batch, _ = _make(images, transform)
    samples, _ = _by_cpu(images, transform)
    np.testing.assert_allclose(_bytes_of(batch), samples, atol=0.01)


def test_what_is_no_baseline_jpeg_joins_the_batch_in_its_place() -> None:
    photo = ramp(20, 18, seed=5)
    images = [
        _file(photo),
        _file(photo, "PNG"),
        _file(photo, progressive=True),
        photo,
        _file(photo, mode="CMYK"),
        _file(photo)[:-60],
        _file(photo)[:-60] + b"\xff\xd9",
        b"no image",
        _file(photo, keep_rgb=True),
        _file(ramp(1, 1)),
        _file(photo) + b"\0",
    ]
    batch, planes = _make(images, _transform())
    samples, bad = _by_cpu(images, _transform())
    good = [at for at, record in enumerate(_backwards(images)) if record not in bad]
    np.testing.assert_allclose(_bytes_of(batch)[good], samples[good], atol=0.01)
    assert {number: str(error) for number, error in batch.bad.items()} == {
        number: str(error) for number, error in bad.items()
    }
    assert sorted(batch.bad) == [5, 6, 7]
    assert "record 5 can't be decoded" in str(batch.bad[5])
    labels = [10 * int(record) for record in _backwards(images)[good]]
    assert batch.labels[good].tolist() == labels
    assert planes.calls[0] == 3  # the photograph, the broken one, and the tiny one
    assert planes.calls[1:] == [1, 2, 1, 1]  # halved, until the broken one stands alone


def test_a_label_out_of_range_is_named_as_on_the_cpu() -> None:
    batch, planes = _make(_photographs(), _transform(), num_labels=11)
    assert sorted(batch.bad) == [2, 3]
    assert str(batch.bad[2]).startswith("record 2 has the label 20, but with --num_labels 11")
    assert batch.labels[2:].tolist() == [10, 0]
    assert planes.calls == [2]


def test_large_photographs_are_decoded_by_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    images = _photographs()
    whole, _ = _make(images, _transform())
    monkeypatch.setattr(decoder_module, "_SUB_BATCH", 2000)
    batch, planes = _make(images, _transform())
    assert planes.calls == [1, 2, 1]
    assert torch.equal(batch.images, whole.images)


class _Cropped(PlaneDecoder):
    def decode(self, files: Sequence[Tensor]) -> list[Tensor]:
        return [image[:, :5] for image in super().decode(files)]


def test_pixels_of_another_size_than_the_files_header_says_are_not_used() -> None:
    images = _photographs()
    batch, _ = _make(images, _transform("none"), decoder=_Cropped)
    plain, _ = _make(images, _transform("none"))
    assert not batch.bad
    assert (batch.images - plain.images).abs().max() < 8  # libjpeg-turbo's colours


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file[:-1],
        lambda file: file[:20] + b"\xff\xff" + file[20:],
        lambda file: file[:20] + b"\xff\xc8\0\2" + file[20:],
        lambda file: file[:20] + file[-2:],
        lambda file: file[:2] + b"\xff\xc0\0\4" + file[-2:],
        lambda file: file.replace(b"\xff\xc0", b"\xff\xc1"),
        lambda file: file.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
        lambda file: file.replace(b"\xff\xc0\0\x11\x08\0\x0a", b"\xff\xc0\0\x11\x08\xff\xff"),
    ],
)
def test_what_is_unusual_in_a_header_is_the_cpus(damage: Callable[[bytes], bytes]) -> None:
    file = _file(ramp(10, 3000))
    assert baseline_size(file) == (3000, 10)
    assert damage(file) != file
    assert baseline_size(damage(file)) is None


def test_a_file_whose_colours_are_rgb_is_the_cpus() -> None:
    file = _file(ramp(10, 3000), keep_rgb=True)
    frame = file.index(b"\xff\xc0")
    ids = file.index(b"R", frame)
    by_adobe = file[:ids] + b"\1" + file[ids + 1 :]
    by_id = file.replace(b"Adobe", b"adobe")
    assert baseline_size(by_adobe) is None
    assert baseline_size(by_id) is None
    assert baseline_size(by_adobe.replace(b"Adobe", b"adobe")) == (3000, 10)


def test_nothing_imports_triton_or_torchvision_before_a_gpu_decodes() -> None:
    names = re.compile(
        r"^(?:import|from) (triton|torchvision|paceline\.data\.gpu_decode\.kernel)", re.M
    )
    package = Path(decoder_module.__file__).parents[2]
    found = {path.name for path in package.rglob("*.py") if names.search(path.read_text("utf-8"))}
    assert found == {"kernel.py"}


class _Torchvision:
    """Stands in for the package, which says what it was given or refuses, and for an event."""

    def __init__(self, refusal: str = "") -> None:
        self._refusal = refusal
        self.calls: list[object] = []
        self.io = self
        self.ImageReadMode = self
        self.GRAY, self.RGB = "grey", "rgb"

    def record(self, stream: str) -> None:
        self.calls.append(f"record on {stream}")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def decode_jpeg(self, files: list[Tensor], *, mode: str, device: torch.device) -> list[Tensor]:
        self.calls += [bytes(file.numpy()) for file in files]
        self.calls.append((mode, str(device)))
        if self._refusal:
            raise RuntimeError(self._refusal)
        return files


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Pretend that there is a GPU, and a given torchvision."""

    def pretend(torchvision: object) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
        monkeypatch.setattr(torch.cuda, "Event", lambda blocking: torchvision)
        monkeypatch.setitem(sys.modules, "torchvision", torchvision)
        monkeypatch.setitem(sys.modules, "torchvision.io", torchvision)

    return pretend


def test_nvjpeg_gets_the_files_of_a_batch_at_once(gpu: Any) -> None:
    package = _Torchvision()
    gpu(package)
    decoder = TorchvisionDecoder(channels=1, device=torch.device("cuda:1"))
    files = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (b"one", b"two")]
    assert len(decoder.decode(files)) == 2
    assert package.calls == [b"one", b"two", ("grey", "cuda:1")]
    require_gpu_decoding("cuda")
    assert package.calls[-1] == ("rgb", "cuda:2")


def test_pixels_are_kept_until_the_kernels_of_an_earlier_launch_have_read_them(gpu: Any) -> None:
    event = _Torchvision()
    gpu(event)
    kept = KeptPixels()
    pixels = [torch.zeros(1) for _ in range(3)]
    alive = [weakref.ref(each) for each in pixels]
    for number in range(3):
        kept.keep([pixels.pop(0)], f"stream {number}")  # type: ignore[arg-type]
    assert event.calls == [f"record on stream {number}" for number in range(3)]
    kept.free()
    assert event.calls[3:] == ["synchronize", "synchronize"]
    assert [each() is None for each in alive] == [True, True, False]


OTHERWISE = ", or decode by --decode_device cpu."


def _refused(given: str = "cuda") -> str:
    with pytest.raises(ConfigError) as caught:
        require_gpu_decoding(given)
    return str(caught.value)


def test_without_a_device_decoding_on_the_gpu_is_refused() -> None:
    assert _refused() == (
        "--decode_device cuda: it needs a CUDA device, and torch finds none here; start it where "
        "one is" + OTHERWISE
    )
    assert _refused("auto").startswith("--decode_device auto: it needs a CUDA device")


def test_without_torchvision_or_triton_decoding_on_the_gpu_is_refused(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(None)
    assert _refused() == (
        "--decode_device cuda: it needs torchvision, which isn't installed; run pip install "
        "'paceline[gpu]' beside a CUDA build of torch" + OTHERWISE
    )
    gpu(_Torchvision())
    monkeypatch.setitem(sys.modules, "triton", None)
    assert _refused().startswith("--decode_device cuda: it needs triton, which isn't installed; ")


def test_torchvision_that_does_not_import_is_refused(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu(None)
    monkeypatch.delitem(sys.modules, "torchvision")
    content = "raise RuntimeError('operator torchvision::nms does not exist')"
    put(tmp_path, "torchvision/__init__.py", content.encode())
    monkeypatch.syspath_prepend(tmp_path)
    said = _refused()
    assert "torchvision, which doesn't import: operator torchvision::nms does not exist; " in said


def test_torchvision_without_nvjpeg_is_refused(gpu: Any) -> None:
    gpu(_Torchvision("torchvision not compiled with nvJPEG support"))
    assert "can't decode here: torchvision not compiled with nvJPEG support; " in _refused()


def test_a_loader_takes_batches_of_both_devices() -> None:
    """A switch between the devices, other shares and a bad record: the bits of the CPU alone."""
    images = [
        simplejpeg.encode_jpeg(ramp(20, 16, seed=i), colorsubsampling="444") for i in range(24)
    ]
    images[9] = b"no image"
    source = ListSource([Record(image, at) for at, image in enumerate(images)])
    transform = Transform(augment="caffe2", image_size=8, scale=10, seed=3)
    order = Order(size=24, batch_size=8, shuffle=False)
    shares = [(5, 3), (8, 0), (3, 5), (0, 8), (4, 4)]
    pool, thread, present = DecodePool(0), DecodeThread(), DecodeDevice("cpu")
    try:
        cpu = host_batches(pool, source, transform, mean=MEAN, std=STD)
        maker = SampleMaker(
            source=source, transform=transform, fill=np.array(FILL, np.uint8), num_labels=None
        )
        gpu = GpuBatchDecoder(
            maker, mean=MEAN, std=STD, device=CPU, jpeg=PlaneDecoder(3), channels_last=True
        )
        switched = SwitchedBatches(
            present, cpu, DeviceBatches(pool, FileMaker(**vars(maker)), gpu, thread)
        )
        loaders = [DatabaseLoader(order, each, skip_bad=True) for each in (cpu, switched)]
        for number, divided in enumerate(shares):
            step = number % 3
            places = [order.place(0, at % 3, 0, 2, divided) for at in (step, step + 1)]
            expected, found = (loader.batch(places[0], places[1:]) for loader in loaders)
            assert found.place == expected.place
            assert torch.equal(found.labels, expected.labels)
            assert torch.allclose(found.images, expected.images, rtol=0, atol=1e-5)
            present.name = "cuda" if number % 2 == 0 else "cpu"
    finally:
        pool.close()
        thread.close()
