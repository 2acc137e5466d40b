"""A database of made-up photographs, for benchmarks that must cost what photographs cost.

Noise whose amplitude falls with its frequency as in nature (about 1/f), colour smoother than light,
and a sensor's grain: at quality 90 a file of 500 × 375 pixels has 80 to 110 KB, as in ImageNet, and
costs its decoder as much.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from paceline.data.db.formats.record_formats import encode_record
from paceline.data.db.write.writers import LmdbWriter
from paceline.data.source import Pixels

WIDTH, HEIGHT, QUALITY = 500, 375, 90


def write_photographs(folder: Path, records: int, distinct: int = 64) -> list[int]:
    """Write an LMDB of `records` photographs, of which `distinct` differ.

    Returns:
        The sizes of the distinct files in bytes.
    """
    files = [jpeg(photograph(np.random.default_rng(seed))) for seed in range(distinct)]
    folder.mkdir()
    writer = LmdbWriter(folder)
    for index in range(records):
        writer.put(
            b"%08d" % index, encode_record(files[index % distinct], index % 1000, "tensorprotos")
        )
    writer.finish()
    writer.close()
    return [len(file) for file in files]


def photograph(random: np.random.Generator) -> Pixels:
    """Make a picture, shape (HEIGHT, WIDTH, 3)."""
    light, red, blue = _noise(random, 1.2), _noise(random, 1.6), _noise(random, 1.6)
    grain = random.normal(scale=random.uniform(2, 9), size=(HEIGHT, WIDTH))
    light = 120 + 50 * light + grain
    planes = [light + 15 * red, light - 7 * red - 7 * blue, light + 15 * blue]
    return np.clip(np.stack(planes, axis=-1), 0, 255).astype(np.uint8)


def jpeg(pixels: Pixels) -> bytes:
    """Encode a picture as cameras and Pillow do: half as many pixels of colour each way."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def _noise(random: np.random.Generator, power: float) -> npt.NDArray[np.float64]:
    """Noise of deviation 1 whose amplitude is 1 / frequency ** power, shape (HEIGHT, WIDTH)."""
    down, right = np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None, :]
    frequency = np.hypot(down, right)
    frequency[0, 0] = np.inf  # no mean
    spectrum = np.fft.rfft2(random.normal(size=(HEIGHT, WIDTH))) / frequency**power
    noise = np.fft.irfft2(spectrum, s=(HEIGHT, WIDTH))
    return np.asarray(noise / noise.std())
