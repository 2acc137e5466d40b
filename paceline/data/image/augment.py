"""What is made of an image: a plan, as pure functions of its size and of random numbers.

A plan is made before any pixel is decoded, so that decoding scales down as far as the plan allows
and only the part that is needed is resized, once:

    source        box                    resized to size²    mirrored, moved by shift
    +----------------------+
    |    +--------+        |             +------+             +------+
    |    |  box   |        |     -->     |      |     -->     |      |
    |    +--------+        |             +------+             +------+
    +----------------------+

Cutting a box of round(short side · image_size / scale) source pixels and resizing it once is
"short side to `scale`, then crop `image_size`", up to half a source pixel; a random crop chooses
among the source's pixels.

Where the kinds come from: `caffe2` is Caffe2's image input operator; `inception` the area and
aspect of Szegedy et al., "Going deeper with convolutions", 2014, drawn as torchvision's
RandomResizedCrop does; `pad` the 4 pixels of He et al., "Deep residual learning", 2015, for CIFAR,
filled with the mean, which is zero after normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.data.image.color_jitter import Jitter, draw_jitter

Augment = Literal["caffe2", "inception", "pad", "none"]
Box = tuple[int, int, int, int]

_PADDING = 4
_TRIES = 10  # of the inception crop, before it falls back to the centre
_AREA = (0.08, 1.0)
_LOG_ASPECT = (math.log(3 / 4), math.log(4 / 3))
# A sample's numbers: mirror, colour, the crop's place, and an area and an aspect for each try.
_MIRROR = 0
_COLOR = slice(1, 4)
_PLACE = slice(4, 6)
_SHAPES = 6
DRAWS = _SHAPES + 2 * _TRIES


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Crop, resize, shift, mirror and colour parameters for one image.

    Attributes:
        box: left, top, right and bottom edge of the crop, in whole source pixels.
        size: height and width of the result in pixels; the crop is resized to this size.
        shift: (down, right), number of pixels by which the resized and mirrored crop is moved;
            pixels that become empty are filled with the mean.
        flip: whether the image is mirrored left to right.
        jitter: the colour jitter; None for no jitter.
    """

    box: Box
    size: int
    shift: tuple[int, int] = (0, 0)
    flip: bool = False
    jitter: Jitter | None = None


@dataclass(frozen=True, kw_only=True)
class Transform:
    """Image transform: random in training, deterministic in evaluation.

    Attributes:
        augment: the augmentation method. In evaluation, `caffe2` and `inception` scale the short
            side to `scale` and crop the centre; `pad` and `none` scale the short side to
            `image_size`.
        image_size: height and width of a sample in pixels.
        scale: length of the short side before the crop, in pixels.
        channels: 1 (grey) or 3 (RGB).
        color_jitter: the largest relative change of brightness, contrast and saturation; 0 is off.
        seed: seed of the random numbers.
        train: True for training; False for evaluation, in which nothing is random.
    """

    augment: Augment = "caffe2"
    image_size: int = 227
    scale: int = 256
    channels: int = 3
    color_jitter: float = 0.0
    seed: int = 0
    train: bool = True

    @property
    def draws(self) -> int:
        """Count the random numbers that `view` uses up for a sample."""
        if not self.train:
            return 0
        return DRAWS if self.augment == "inception" else _SHAPES

    def view(self, width: int, height: int, numbers: Sequence[float]) -> View:
        """Plan what is made of an image.

        Args:
            width: of the source, in pixels.
            height: of the source, in pixels.
            numbers: `draws` numbers in [0, 1).
        """
        short = min(width, height)
        cuts = self.augment in ("caffe2", "inception")
        cut = max(1, round(short * self.image_size / self.scale)) if cuts else short
        if not self.train:
            return View(box=_centre(width, height, cut, cut), size=self.image_size)
        box, shift = self._crop(width, height, cut, numbers)
        return View(
            box=box,
            size=self.image_size,
            shift=shift,
            flip=self.augment != "none" and numbers[_MIRROR] < 0.5,
            jitter=draw_jitter(self.color_jitter, numbers[_COLOR]) if self.color_jitter else None,
        )

    def _crop(
        self, width: int, height: int, cut: int, numbers: Sequence[float]
    ) -> tuple[Box, tuple[int, int]]:
        down, right = numbers[_PLACE]
        match self.augment:
            case "caffe2":
                return _place(width, height, cut, cut, down, right), (0, 0)
            case "inception":
                return _inception(width, height, numbers), (0, 0)
            case "pad":
                places = 2 * _PADDING + 1
                shift = (int(down * places) - _PADDING, int(right * places) - _PADDING)
                return _centre(width, height, cut, cut), shift
            case "none":
                return _centre(width, height, cut, cut), (0, 0)


def _centre(width: int, height: int, cut_width: int, cut_height: int) -> Box:
    left = (width - cut_width) // 2
    top = (height - cut_height) // 2
    return left, top, left + cut_width, top + cut_height


def _place(
    width: int, height: int, cut_width: int, cut_height: int, down: float, right: float
) -> Box:
    """Put a box somewhere in the image, every place alike; `down` and `right` are in [0, 1)."""
    left = int(right * (width - cut_width + 1))
    top = int(down * (height - cut_height + 1))
    return left, top, left + cut_width, top + cut_height


def _inception(width: int, height: int, numbers: Sequence[float]) -> Box:
    """Cut 8 to 100 % of the area, 3:4 to 4:3 wide; the first of ten tries that fits."""
    down, right = numbers[_PLACE]
    for at in range(_SHAPES, DRAWS, 2):
        area = width * height * _between(_AREA, numbers[at])
        aspect = math.exp(_between(_LOG_ASPECT, numbers[at + 1]))
        cut_width = round(math.sqrt(area * aspect))
        cut_height = round(math.sqrt(area / aspect))
        if 0 < cut_width <= width and 0 < cut_height <= height:
            return _place(width, height, cut_width, cut_height, down, right)
    # As torchvision: the largest centred box of an allowed aspect.
    widest = min(width, round(height * math.exp(_LOG_ASPECT[1])))
    highest = min(height, round(width / math.exp(_LOG_ASPECT[0])))
    return _centre(width, height, max(1, widest), max(1, highest))


def _between(limits: tuple[float, float], number: float) -> float:
    low, high = limits
    return low + (high - low) * number
