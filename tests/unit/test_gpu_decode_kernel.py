"""The kernel by Triton's interpreter, against what the CPU makes of the same pixels."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from paceline.data.gpu_decode import kernel
from paceline.data.gpu_decode.kernel import make_samples
from paceline.data.gpu_decode.plan import TAPS, plan_of
from paceline.data.image.augment import Box, View
from paceline.data.image.color_jitter import Jitter
from paceline.data.image.decode import decode
from paceline.data.image.pixels import upright
from paceline.data.source import Pixels

FILL = 100
SIZE = 16
Case = tuple[tuple[int, int], int, Box, tuple[int, int], bool]
# Height and width as stored, EXIF orientation, box in the upright image, shift, mirrored.
CASES: list[Case] = [
    ((16, 16), 1, (0, 0, 16, 16), (0, 0), False),  # nothing to do
    ((29, 27), 1, (3, 1, 26, 28), (0, 0), True),  # shrinks
    ((9, 11), 1, (2, 1, 9, 8), (0, 0), False),  # grows
    ((25, 8), 1, (0, 0, 8, 25), (-3, 2), True),  # shrinks down, grows across
    ((32, 32), 3, (0, 0, 32, 32), (4, -4), False),  # by exactly 2
    ((38, 20), 6, (7, 2, 35, 18), (0, 0), False),  # turned; one side is as it is
    ((23, 31), 5, (1, 4, 21, 30), (0, 4), True),
    ((1, 1), 1, (0, 0, 1, 1), (0, 0), False),
]
JITTER = Jitter(brightness=1.3, contrast=0.6, saturation=1.4)


def _row(place: int, planes: Tensor, orientation: int, view: View) -> list[int]:
    height, width = planes.shape[1:]
    row = plan_of((height * width, width, 1), (height, width), orientation, view)
    row[0] = place
    row[1] += planes.data_ptr()
    return row


def _both(
    cases: list[Case],
    *,
    channels: int,
    size: int = SIZE,
    jitter: Jitter | None = None,
    memory: torch.memory_format = torch.channels_last,
) -> tuple[Pixels, Pixels]:
    """Samples of random images in 0..255, by the kernel and by the CPU."""
    random = np.random.default_rng(3)
    planes, plans = [], []
    expected = np.zeros((len(cases), size, size, channels), np.uint8)
    fill = np.full(channels, FILL, np.uint8)
    for at, (shape, orientation, box, shift, flip) in enumerate(cases):
        view = View(box=box, size=size, shift=shift, flip=flip, jitter=jitter)
        image = random.integers(0, 256, (*shape, channels), dtype=np.uint8)
        planes.append(torch.from_numpy(image.transpose(2, 0, 1).copy()))
        plans.append(_row(len(cases) - 1 - at, planes[-1], orientation, view))
        turned = np.ascontiguousarray(upright(image, orientation))
        plan = partial(lambda chosen, width, height: chosen, view)
        decode(turned, plan, expected[len(cases) - 1 - at], fill=fill, name=lambda: "record")
    constants = torch.tensor([[0.5], [3.0], [FILL]]).expand(3, channels).contiguous()
    samples = torch.zeros(len(cases), channels, size, size).to(memory_format=memory)
    make_samples(torch.tensor(plans), constants, samples)
    return ((samples - 3) * 2).permute(0, 2, 3, 1).numpy(), expected


# Height and width of boxes: grow, stay, shrink by little, by much, in one direction, ...
SHAPES = [(9, 23), (40, 40), (59, 43), (90, 110), (7, 400), (1200, 3), (1, 1), (40, 81)]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_batch_of_all_scales_and_orientations_is_that_of_torch_bit_for_bit(channels: int) -> None:
    """Each image has a border, of which no pixel may count."""
    random = np.random.default_rng(4)
    planes, plans, expected = [], [], []
    for place, (height, width) in enumerate(SHAPES):
        orientation = 1 + place
        upright_shape = height + 5, width + 3
        shape = upright_shape if orientation < 5 else upright_shape[::-1]
        image = random.integers(0, 256, (*shape, channels), dtype=np.uint8)
        planes.append(torch.from_numpy(image.transpose(2, 0, 1).copy()))
        view = View(box=(1, 2, 1 + width, 2 + height), size=40)
        plans.append(_row(place, planes[-1], orientation, view))
        turned = torch.from_numpy(np.ascontiguousarray(upright(image, orientation)))
        box = turned.permute(2, 0, 1)[None, :, 2 : 2 + height, 1 : 1 + width]
        expected.append(interpolate(box, size=(40, 40), mode="bilinear", antialias=True))
    samples = torch.empty(len(SHAPES), channels, 40, 40)
    unchanged = torch.tensor([[1.0], [0.0], [FILL]]).expand(3, channels).contiguous()
    make_samples(torch.tensor(plans), unchanged, samples)
    assert torch.equal(samples, torch.cat(expected).float())


def test_no_source_pixel_is_beyond_the_box() -> None:
    """What is read there would have no weight, but needn't be the process's memory."""
    lengths = (1, 2, 9, 40, 59, 900)
    views = [View(box=(0, 0, length, 7), size=40) for length in lengths]
    plans = torch.tensor([plan_of((6300, 900, 1), (7, 900), 1, view) for view in views])
    taps = plans[:, TAPS]
    weights = torch.empty((len(plans), 2, 1 + int(taps.max()), 40), dtype=torch.int32)
    kernel._weigh[len(plans), 2, 1](plans, weights, int(taps.max()), SIZE=40)
    first = weights[:, :, 0]
    assert (first.amin(dim=2) == 0).all()
    assert (first.amax(dim=2) + taps == plans[:, 5:7]).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_samples_are_those_of_the_cpu_bit_for_bit(channels: int) -> None:
    samples, expected = _both(CASES, channels=channels)
    np.testing.assert_array_equal(samples, expected)


def test_a_sample_of_several_tiles_and_planes_is_that_of_the_cpu() -> None:
    samples, expected = _both(CASES[2:4], channels=3, size=35, memory=torch.contiguous_format)
    np.testing.assert_array_equal(samples, expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_coloured_samples_are_those_of_the_cpu_to_one_level(channels: int) -> None:
    samples, expected = _both(CASES[:4], channels=channels, jitter=JITTER)
    levels = np.abs(samples - expected)
    assert levels.max() <= 1
    assert (levels > 0).mean() < 0.002
    _, plain = _both(CASES[:4], channels=channels)
    assert np.abs(expected.astype(int) - plain).mean() > 10


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.harness.data.compiled_for_gpu"]
    subprocess.run(command, env=environment, check=True, timeout=100)
