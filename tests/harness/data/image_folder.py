"""Class folders of small real images, with the pixels that a reader must find."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from paceline.data.source import Pixels


def ramp(height: int, width: int, *, seed: int = 0) -> Pixels:
    """Make a smooth RGB image, so that JPEG keeps it nearly; no two seeds are alike."""
    y, x = np.mgrid[0:height, 0:width]
    red = 255 * x / max(width - 1, 1)
    green = 255 * y / max(height - 1, 1)
    blue = np.full_like(red, 37 * seed % 256)
    return np.stack([red, green, blue], axis=2).round().astype(np.uint8)


def file_of(pixels: Pixels, kind: str, *, mode: str | None = None) -> bytes:
    """Write pixels, RGB (height, width, 3) or grey (height, width), as an image file."""
    image = Image.fromarray(pixels)
    if mode is not None:
        image = image.convert(mode)
    file = io.BytesIO()
    image.save(file, kind, quality=95) if kind == "JPEG" else image.save(file, kind)
    return file.getvalue()


def put(folder: Path, name: str, content: bytes) -> None:
    """Write a file and the folders above it."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def some_images(folder: Path, *, classes: int = 3, each: int = 5, size: int = 16) -> None:
    """Make class folders of JPEG files `class<i>/<j>.jpg`."""
    for label in range(classes):
        for j in range(each):
            pixels = ramp(size, size + j, seed=label * each + j)
            put(folder, f"class{label}/{j}.jpg", file_of(pixels, "JPEG"))
