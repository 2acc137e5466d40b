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

from paceline.data.gpu_decode.kernel import make_samples
from paceline.data.gpu_decode.plan import plan_of
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
        row = plan_of(planes[-1].stride(), shape, orientation, view)
        row[0] = len(cases) - 1 - at
        row[1] += planes[-1].data_ptr()
        plans.append(row)
        turned = np.ascontiguousarray(upright(image, orientation))
        plan = partial(lambda chosen, width, height: chosen, view)
        decode(turned, plan, expected[len(cases) - 1 - at], fill=fill, name=lambda: "record")
    constants = torch.tensor([[0.5], [3.0], [FILL]]).expand(3, channels).contiguous()
    samples = torch.zeros(len(cases), channels, size, size).to(memory_format=memory)
    make_samples(torch.tensor(plans), constants, samples)
    return ((samples - 3) * 2).permute(0, 2, 3, 1).numpy(), expected


@pytest.mark.parametrize("channels", [1, 3])
def test_samples_are_those_of_the_cpu_bit_for_bit(channels: int) -> None:
    samples, expected = _both(CASES, channels=channels)
    np.testing.assert_array_equal(samples, expected)


def test_a_sample_of_several_tiles_and_planes_is_that_of_the_cpu() -> None:
    samples, expected = _both(CASES[2:4], channels=3, size=19, memory=torch.contiguous_format)
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
