"""Image files in all their kinds, and what is stored of them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from paceline.config.db import Encoding
from paceline.data.image.image_errors import DamagedImage
from paceline.data.image.image_file import (
    check_image,
    is_image,
    stored_form,
)
from paceline.data.image.jpeg import jpeg_pixels
from paceline.data.source import Pixels
from tests.harness.data.image_folder import file_of, ramp


def pixels_of(stored: bytes | Pixels) -> Pixels:
    """Decode what is stored, by Pillow alone: (height, width, channels)."""
    if isinstance(stored, bytes):
        array = np.asarray(Image.open(io.BytesIO(stored)))
        return array.reshape(*array.shape[:2], -1)
    return stored


def distance(one: Pixels, other: Pixels) -> float:
    assert one.shape == other.shape
    return float(np.abs(one.astype(int) - other.astype(int)).mean())


RGB = ramp(20, 30)
GREY = RGB[:, :, 0]
PALETTE = np.where(RGB > 127, 255, 0).astype(np.uint8)  # few colours: a palette holds them all
DEEP = GREY.astype(np.uint16) * 257


def rgba() -> bytes:
    alpha = np.full((20, 30, 1), 9, dtype=np.uint8)
    return file_of(np.concatenate([RGB, alpha], axis=2), "PNG")


def palette(*, transparent: bool) -> bytes:
    file = io.BytesIO()
    options = {"transparency": b"\x00\x80"} if transparent else {}
    Image.fromarray(PALETTE).convert("P", colors=8, palette=Image.Palette.ADAPTIVE).save(
        file, "PNG", **options
    )
    return file.getvalue()


INPUTS = {
    "RGB PNG": (file_of(RGB, "PNG"), RGB),
    "grey PNG": (file_of(GREY, "PNG"), GREY[:, :, None]),
    "RGBA PNG": (rgba(), RGB),
    "palette PNG": (palette(transparent=False), PALETTE),
    "transparent palette PNG": (palette(transparent=True), PALETTE),
    "16-bit grey PNG": (file_of(DEEP, "PNG"), GREY[:, :, None]),
    "BMP": (file_of(RGB, "BMP"), RGB),
    "GIF": (palette(transparent=False), PALETTE),
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize(("encoding", "allowed"), [("raw", 0.0), ("png", 0.0), ("jpeg", 8.0)])
def test_every_kind_of_image_is_stored_with_its_pixels(
    kind: str, encoding: Encoding, allowed: float
) -> None:
    data, expected = INPUTS[kind]
    stored = stored_form(data, encoding, None)[0]
    assert distance(pixels_of(stored), expected) <= allowed
    if isinstance(stored, bytes):
        assert Image.open(io.BytesIO(stored)).format == encoding.upper()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_files_bytes_stay_as_they_are(mode: str) -> None:
    data = file_of(RGB, "JPEG", mode=mode)
    assert stored_form(data, "jpeg", None)[0] == data
    assert stored_form(data, "jpeg", 20)[0] == data  # it has that size already
    assert stored_form(data, "jpeg", 10)[0] != data


def test_a_png_file_of_eight_bits_stays_as_it_is() -> None:
    data = file_of(RGB, "PNG")
    assert stored_form(data, "png", None)[0] == data


@pytest.mark.parametrize(
    ("height", "width", "resize", "expected"),
    [
        (300, 400, 30, (30, 40)),
        (400, 300, 30, (40, 30)),
        (64, 64, 32, (32, 32)),
        (20, 30, 40, (40, 60)),
        (21, 1000, 7, (7, 333)),
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_short_side_is_resized_and_the_picture_stays(
    kind: str, height: int, width: int, resize: int, expected: tuple[int, int]
) -> None:
    stored = stored_form(file_of(ramp(height, width), kind), "raw", resize)[0]
    assert isinstance(stored, np.ndarray)
    assert stored.shape == (*expected, 3)
    # The ramp at the centres of the new pixels, in the old one's coordinates.
    x = ((np.arange(expected[1]) + 0.5) * width / expected[1] - 0.5).clip(0, width - 1)
    red = 255 * x / (width - 1)
    assert np.abs(stored[:, :, 0].mean(axis=0) - red).mean() < 2


def test_a_tenth_of_a_jpeg_that_is_missing_is_damage() -> None:
    data = file_of(ramp(100, 100), "JPEG")
    short = data[: len(data) * 9 // 10]
    for encoding in ("jpeg", "png", "raw"):
        with pytest.raises(DamagedImage):
            stored_form(short, encoding, None)
    with pytest.raises(DamagedImage, match="Premature end"):
        check_image(short)


@pytest.mark.parametrize("encoding", ["jpeg", "png", "raw"])
def test_a_flipped_byte_in_a_png_is_damage(encoding: Encoding) -> None:
    data = bytearray(file_of(ramp(100, 100), "PNG"))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(DamagedImage):
        stored_form(bytes(data), encoding, None)


@pytest.mark.parametrize("marker", [b"\xff\xdb", b"\xff\xda", b"\xff\xd9"])
def test_harmless_bytes_too_many_in_a_jpeg_are_no_damage(marker: bytes) -> None:
    data = file_of(ramp(100, 90), "JPEG")
    place = data.rindex(marker)
    padded = data[:place] + b"\x12\x34" + data[place:]
    assert stored_form(padded, "jpeg", None)[0] == padded
    assert check_image(padded) == ("jpeg", (90, 100))


@pytest.mark.parametrize("factor", [1, 2, 8])
@pytest.mark.parametrize("colorspace", ["RGB", "GRAY"])
def test_a_jpeg_with_harmless_faults_decodes_as_without(factor: int, colorspace: str) -> None:
    data = file_of(ramp(101, 90), "JPEG")
    odd = data[:11] + b"\0" + data[12:]  # JFIF 0.01: many photographs on the web say so
    size = {"min_height": -(-101 // factor), "min_width": -(-90 // factor), "min_factor": factor}
    sound = simplejpeg.decode_jpeg(data, colorspace=colorspace, **size)
    with pytest.raises(ValueError, match="JFIF"):
        simplejpeg.decode_jpeg(odd, colorspace=colorspace, **size)
    assert distance(jpeg_pixels(odd, colorspace=colorspace, **size), sound) < 2


def test_a_file_is_what_its_content_shows_or_else_its_name() -> None:
    assert is_image(file_of(RGB, "PNG"), "a/photo")
    assert is_image(file_of(RGB, "JPEG"), "a/photo.txt")
    assert is_image(b"<html>not found</html>", "a/photo.JPG")  # and so a damaged one
    assert not is_image(b"<html>not found</html>", "a/index.html")
    assert not is_image(b"", "a/.gitkeep")
    assert not is_image(b"", "a/empty")


def test_facts_are_kind_width_and_height() -> None:
    assert check_image(file_of(RGB, "JPEG")) == ("jpeg", (30, 20))
    assert check_image(file_of(RGB, "PNG")) == ("png", (30, 20))
    assert check_image(RGB) == ("raw", (30, 20))
