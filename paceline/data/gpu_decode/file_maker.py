"""What a decode process prepares for the GPU: a JPEG file and its plan, or else the sample itself.

    record --baseline JPEG--> header: FILE,    the file's size, its plan │ the file
    record --any other------> header: SAMPLE                            │ pixels, made by the CPU
    record --damaged--------> header: NOTHING                           │

So nothing is read, and no header is parsed, by the process that trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from paceline.data.gpu_decode.baseline_jpeg import baseline_size
from paceline.data.gpu_decode.plan import FIELDS, plan_of
from paceline.data.image.jpeg import jpeg_orientation
from paceline.data.sample_maker import SampleMaker
from paceline.data.source import Pixels

NOTHING, FILE, SAMPLE = range(3)
KIND, LENGTH, HEIGHT, WIDTH = range(4)  # cells of a header, before the plan
PLAN = slice(4, 4 + FIELDS)
_CELLS = 22  # one more than are used: a file begins at a multiple of 16 bytes
HEADER = 8 * _CELLS  # bytes
_LONGEST = 2**23  # bytes of a file; a longer one is decoded here. Memory is used only where written


@dataclass(frozen=True, kw_only=True)
class FileMaker(SampleMaker):
    """Sample maker that writes files with their plans, and samples where the GPU decodes none.

    Attributes:
        pinned: the files are copied by nvJPEG.
    """

    pinned: ClassVar[bool] = False

    @property
    def sample_bytes(self) -> int:
        """Count the bytes for header and file, or sample."""
        return HEADER + max(_LONGEST, -(-super().sample_bytes // 8) * 8)

    def write(self, index: int, numbers: list[float], out: Pixels) -> int:
        """Write what the GPU needs of a record; return its label.

        Args:
            index: the record's number.
            numbers: the sample's random numbers.
            out: uint8 of shape (sample_bytes,).

        Raises:
            DataError: the record is damaged, or its label is out of range.
        """
        header = headers_of(out)
        header[KIND] = NOTHING
        record = self.read(index)
        image = record.image
        size = None
        if isinstance(image, bytes) and len(image) <= _LONGEST:
            size = baseline_size(image)
        if size is None or not isinstance(image, bytes):
            self.decode(index, image, numbers, out[HEADER:][: super().sample_bytes])
            header[KIND] = SAMPLE
            return record.label
        width, height = size
        orientation = jpeg_orientation(image)
        upright = size if orientation < 5 else size[::-1]
        view = self.transform.view(*upright, numbers)
        header[LENGTH] = len(image)
        header[HEIGHT] = height
        header[WIDTH] = width
        header[PLAN] = plan_of((width * height, width, 1), (height, width), orientation, view)
        out[HEADER : HEADER + len(image)] = np.frombuffer(image, np.uint8)
        header[KIND] = FILE
        return record.label


def headers_of(samples: Pixels) -> npt.NDArray[np.int64]:
    """Return the headers of samples, (…, bytes of a sample), as int64 of shape (…, cells)."""
    return samples[..., :HEADER].view(np.int64)
