"""Decoding against Pillow: the same pixels, the right colours, and damage by name."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

from paceline.data.image.augment import View
from paceline.data.image.color_jitter import Jitter, jittered
from paceline.data.image.decode import decode
from paceline.data.image.jpeg import jpeg_orientation
from paceline.data.source import Pixels
from paceline.errors import DataError

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def _picture(width: int, height: int, channels: int = 3) -> Pixels:
    """Smooth waves of all directions, colours and a few sizes, like a photograph's larger parts."""
    down, right = np.mgrid[0:height, 0:width] / 100
    planes = [
        128 + 60 * np.sin(9 * right + 4 * down + c) + 50 * np.cos(15 * down - 6 * right * c)
        for c in range(channels)
    ]
    return np.clip(np.stack(planes, axis=-1), 0, 255).astype(np.uint8)


def _encoded(pixels: Pixels | Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    if isinstance(pixels, np.ndarray):
        pixels = Image.fromarray(pixels.squeeze())
    pixels.save(file, kind, **options)
    return file.getvalue()


def _sample(image: bytes | Pixels, view: View, channels: int = 3) -> Pixels:
    out = np.full((view.size, view.size, channels), 77, dtype=np.uint8)
    fill = np.full(channels, 128, dtype=np.uint8)
    decode(image, lambda width, height: view, out, fill=fill, name=lambda: "record 5")
    return out


def _by_pillow(image: bytes, view: View, mode: str = "RGB") -> Pixels:
    """Pillow's own full decoding, crop, resize and mirror."""
    opened = Image.open(io.BytesIO(image)).convert(mode).crop(view.box)
    opened = opened.resize((view.size, view.size), Image.Resampling.BILINEAR)
    if view.flip:
        opened = opened.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(opened).reshape(view.size, view.size, -1)


def _difference(ours: Pixels, theirs: Pixels) -> tuple[float, float]:
    """Largest and mean difference in levels."""
    levels = np.abs(ours.astype(int) - theirs)
    return levels.max(), levels.mean()


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("box", [(0, 0, 375, 375), (86, 23, 414, 351), (10, 40, 450, 300)])
def test_a_png_is_cut_and_resized_as_pillow_does(
    box: tuple[int, int, int, int], flip: bool
) -> None:
    data, view = _encoded(_picture(500, 375), "PNG"), View(box=box, size=224, flip=flip)
    largest, mean = _difference(_sample(data, view), _by_pillow(data, view))
    assert largest <= 1
    assert mean < 0.02


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_a_jpeg_is_cut_and_resized_as_pillow_does(subsampling: int) -> None:
    data = _encoded(_picture(500, 375), "JPEG", quality=90, subsampling=subsampling)
    view = View(box=(86, 23, 414, 351), size=224, flip=True)
    largest, mean = _difference(_sample(data, view), _by_pillow(data, view))
    assert largest <= 6  # colour at half the resolution is doubled, not interpolated
    assert mean < 1


def test_enlarging_is_pillows_too() -> None:
    data, view = _encoded(_picture(40, 30), "PNG"), View(box=(3, 2, 31, 30), size=96)
    assert _difference(_sample(data, view), _by_pillow(data, view))[0] <= 1


@pytest.mark.parametrize(("size", "factor"), [(200, 2), (100, 4), (60, 8)])
def test_a_large_jpeg_is_decoded_smaller_and_looks_the_same(
    size: int, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    turbo = simplejpeg.decode_jpeg

    def watched(data: bytes, **options: Any) -> Pixels:
        pixels: Pixels = turbo(data, **options)
        shapes.append(pixels.shape)
        return pixels

    monkeypatch.setattr(simplejpeg, "decode_jpeg", watched)
    data = _encoded(_picture(801, 603), "JPEG", quality=95)
    view = View(box=(104, 48, 600, 544), size=size)
    largest, mean = _difference(_sample(data, view), _by_pillow(data, view))
    assert shapes == [(-(-603 // factor), -(-801 // factor), 3)]
    assert largest < 12  # another filter, not another place
    assert mean < 3


@pytest.mark.parametrize("size", [200, 100, 60])
def test_a_box_between_the_pixels_of_a_smaller_image_moves_by_half_of_one_at_most(
    size: int,
) -> None:
    ramp = np.tile(np.linspace(0, 255, 801).astype(np.uint8)[None, :, None], (603, 1, 3))
    data = _encoded(ramp, "JPEG", quality=100)
    view = View(box=(101, 50, 603, 552), size=size)
    levels_a_pixel = 255 / 801 * 502 / size
    largest, _ = _difference(_sample(data, view), _by_pillow(data, view))
    assert largest <= levels_a_pixel / 2 + 2


def test_a_jpeg_less_than_twice_as_large_is_decoded_in_full() -> None:
    data = _encoded(_picture(400, 300), "JPEG", quality=95, subsampling=0)
    view = View(box=(0, 0, 300, 300), size=151)
    largest, mean = _difference(_sample(data, view), _by_pillow(data, view))
    assert largest <= 2
    assert mean < 0.1


@pytest.mark.parametrize("color", [RED, GREEN, BLUE])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "raw"])
def test_pure_colours_stay_what_they_are(kind: str, color: tuple[int, int, int]) -> None:
    pixels = np.full((20, 30, 3), color, dtype=np.uint8)
    image = pixels if kind == "raw" else _encoded(pixels, kind, quality=100)
    sample = _sample(image, View(box=(5, 0, 25, 20), size=16, flip=True))
    assert np.abs(sample.astype(int) - color).max() <= 2


def test_an_image_of_the_right_size_keeps_its_bytes() -> None:
    pixels = _picture(32, 32)
    view = View(box=(0, 0, 32, 32), size=32)
    assert np.array_equal(_sample(pixels, view), pixels)
    assert np.array_equal(_sample(_encoded(pixels, "PNG"), view), pixels)


def test_raw_pixels_and_their_png_give_the_same_sample() -> None:
    pixels, view = _picture(90, 70), View(box=(5, 6, 60, 61), size=32, flip=True)
    assert np.array_equal(_sample(pixels, view), _sample(_encoded(pixels, "PNG"), view))


def test_read_only_pixels_will_do() -> None:
    pixels = np.frombuffer(_picture(40, 40).tobytes(), np.uint8).reshape(40, 40, 3)
    assert _sample(pixels, View(box=(0, 0, 40, 40), size=20)).shape == (20, 20, 3)


@pytest.mark.parametrize("shift", [(0, 0), (2, -3), (-4, 4), (0, 1)])
@pytest.mark.parametrize("flip", [False, True])
def test_a_moved_image_is_a_crop_of_the_mirrored_and_padded_one(
    shift: tuple[int, int], flip: bool
) -> None:
    pixels, (down, right) = _picture(32, 32), shift
    mirrored = pixels[:, ::-1] if flip else pixels
    padded = np.pad(mirrored, ((4, 4), (4, 4), (0, 0)), constant_values=128)
    expected = padded[4 - down : 36 - down, 4 - right : 36 - right]
    view = View(box=(0, 0, 32, 32), size=32, shift=shift, flip=flip)
    assert np.array_equal(_sample(pixels, view), expected)


def test_jitter_is_applied_to_what_is_seen_and_not_to_the_padding() -> None:
    pixels, jitter = _picture(32, 32), Jitter(brightness=1.5, contrast=0.5, saturation=0.2)
    view = View(box=(0, 0, 32, 32), size=32, shift=(4, 0), jitter=jitter)
    sample = _sample(pixels, view)
    assert np.array_equal(sample[4:], jittered(pixels, jitter)[:-4])
    assert (sample[:4] == 128).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_colour_becomes_grey_where_one_channel_is_wanted(kind: str) -> None:
    data, view = _encoded(_picture(80, 60), kind), View(box=(0, 0, 60, 60), size=40)
    assert _difference(_sample(data, view, channels=1), _by_pillow(data, view, "L"))[0] <= 2


def test_raw_colour_becomes_the_same_grey() -> None:
    pixels, view = _picture(80, 60), View(box=(0, 0, 60, 60), size=60)
    expected = _by_pillow(_encoded(pixels, "PNG"), view, "L")
    assert np.array_equal(_sample(pixels, view, channels=1), expected)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "raw"])
def test_grey_becomes_three_equal_channels(kind: str) -> None:
    pixels = _picture(80, 60, channels=1)
    image = pixels if kind == "raw" else _encoded(pixels, kind, quality=100)
    sample = _sample(image, View(box=(10, 0, 70, 60), size=60))
    assert np.abs(sample.astype(int) - pixels[:, 10:70]).max() <= 2


def test_inks_are_read_by_pillow() -> None:
    image = Image.fromarray(_picture(60, 60)).convert("CMYK")
    view = View(box=(0, 0, 60, 60), size=60)
    data = _encoded(image, "JPEG", quality=95)
    assert np.array_equal(_sample(data, view), _by_pillow(data, view))
    assert _difference(_sample(data, view), np.asarray(image.convert("RGB")))[0] <= 12


def test_transparency_and_palettes_show_their_colours() -> None:
    pixels, view = np.full((20, 20, 3), RED, dtype=np.uint8), View(box=(0, 0, 20, 20), size=20)
    clear = Image.fromarray(pixels).convert("RGBA")
    clear.putalpha(0)
    palette = Image.fromarray(pixels).convert("P", palette=Image.Palette.ADAPTIVE)
    for data in (
        _encoded(clear, "PNG"),
        _encoded(palette, "PNG"),
        _encoded(palette, "PNG", transparency=b"\x00" * 5),
        _encoded(palette, "GIF"),
    ):
        assert _sample(data, view)[0, 0].tolist() == [255, 0, 0]


def test_sixteen_bits_are_scaled_to_eight() -> None:
    ramp = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    data = _encoded(Image.fromarray(ramp), "PNG")
    sample = _sample(data, View(box=(0, 0, 16, 16), size=16), channels=1)
    assert sample[:, :, 0].ravel().tolist() == list(range(256))


def _with_orientation(pixels: Pixels, kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return _encoded(pixels, kind, exif=exif, quality=100, subsampling=0)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [40, 10])
def test_an_orientation_in_the_file_is_applied(kind: str, orientation: int, size: int) -> None:
    data = _with_orientation(_picture(64, 48), kind, orientation)
    sizes: list[tuple[int, int]] = []

    def plan(width: int, height: int) -> View:
        sizes.append((width, height))
        return View(box=(4, 4, 44, 44), size=size)

    out = np.empty((size, size, 3), dtype=np.uint8)
    decode(data, plan, out, fill=np.zeros(3, np.uint8), name=lambda: "record 5")
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert sizes == [turned.size]
    expected = turned.convert("RGB").crop((4, 4, 44, 44)).resize((size, size), 2)
    _, mean = _difference(out, np.asarray(expected))
    assert mean < (0.5 if kind == "PNG" else 3)


def test_an_orientation_is_found_in_a_file_with_bytes_between_its_segments() -> None:
    data = _with_orientation(_picture(64, 48), "JPEG", 6)
    odd = data[:2] + b"\xff" + data[2:]  # a byte that fills, as the format allows
    assert jpeg_orientation(odd) == jpeg_orientation(data) == 6


@pytest.mark.parametrize("orientation", [0, 9, 300])
def test_an_orientation_that_does_not_exist_leaves_the_image_as_it_is(orientation: int) -> None:
    data = _with_orientation(_picture(64, 48), "JPEG", orientation)
    sizes: list[tuple[int, int]] = []

    def plan(width: int, height: int) -> View:
        sizes.append((width, height))
        return View(box=(0, 0, width, height), size=32)

    out = np.empty((32, 32, 3), dtype=np.uint8)
    decode(data, plan, out, fill=np.zeros(3, np.uint8), name=lambda: "record 5")
    assert sizes == [(64, 48)]
    upright = _with_orientation(_picture(64, 48), "JPEG", 1)
    assert np.array_equal(out, _sample(upright, View(box=(0, 0, 64, 48), size=32)))


def test_damaged_exif_data_leave_the_image_as_it_is() -> None:
    data = _with_orientation(_picture(64, 48), "JPEG", 6).replace(b"Exif\0\0MM", b"Exif\0\0XX")
    assert b"Exif\0\0XX" in data
    view = View(box=(4, 4, 44, 44), size=40)
    assert _difference(_sample(data, view), _by_pillow(data, view))[1] < 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(kind: str) -> None:
    size = (
        struct.pack(">II", 13_300, 13_300) if kind == "PNG" else struct.pack(">HH", 13_300, 13_300)
    )
    data = bytearray(_encoded(_picture(64, 48), kind))
    at = 16 if kind == "PNG" else data.index(b"\xff\xc0") + 5
    data[at : at + len(size)] = size
    if kind == "PNG":
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(DataError, match=r"it has 13,300 × 13,300 pixels, but the limit is .*scale"),
    ):
        _sample(bytes(data), View(box=(0, 0, 40, 40), size=40))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no image at all",
        b"\xff\xd8\xff",
        _encoded(_picture(60, 40), "JPEG")[:700],
        _encoded(_picture(60, 40), "PNG")[:700],
    ],
    ids=["empty", "text", "jpeg without a header", "jpeg cut off", "png cut off"],
)
def test_damage_is_an_error_that_names_the_record_and_the_reason(data: bytes) -> None:
    with pytest.raises(DataError, match=r"^record 5 can't be decoded: \w.+"):
        _sample(data, View(box=(0, 0, 40, 40), size=40))


def test_pixels_of_no_known_shape_are_an_error() -> None:
    with pytest.raises(DataError, match=r"record 5 .*\(4, 4, 2\)"):
        _sample(np.zeros((4, 4, 2), np.uint8), View(box=(0, 0, 4, 4), size=4))
