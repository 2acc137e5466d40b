"""Plans: where their boxes lie, how they are spread, and that evaluation has none of it."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.image.augment import Augment, Transform, View
from paceline.data.order import uniforms

SIDES = st.integers(1, 3000)
NUMBERS = st.lists(st.floats(0, 1, exclude_max=True), min_size=26, max_size=26)


def _views(transform: Transform, width: int, height: int, count: int) -> list[View]:
    numbers = uniforms(1, 2, np.arange(count), transform.draws).tolist()
    return [transform.view(width, height, row) for row in numbers]


@given(width=SIDES, height=SIDES, numbers=NUMBERS, train=st.booleans())
@pytest.mark.parametrize("augment", get_args(Augment))
def test_a_box_lies_inside_its_image(
    augment: Augment, width: int, height: int, numbers: list[float], train: bool
) -> None:
    view = Transform(augment=augment, image_size=224, train=train).view(width, height, numbers)
    left, top, right, bottom = view.box
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert view.size == 224


def test_caffe2_cuts_the_part_that_image_size_is_of_scale() -> None:
    # Scaled by 256 / 375, a box of 224 pixels is one of 328.1.
    for view in _views(Transform(augment="caffe2", image_size=224, scale=256), 500, 375, 50):
        left, top, right, bottom = view.box
        assert (right - left, bottom - top) == (328, 328)


def test_caffe2s_crops_reach_every_place_alike_and_mirror_half() -> None:
    views = _views(Transform(augment="caffe2", image_size=2, scale=4), 6, 4, 6000)
    places = np.zeros((3, 5))
    for view in views:
        places[view.box[1], view.box[0]] += 1
    assert ((places - 400) ** 2 / 400).sum() < 40  # 14 degrees of freedom
    assert 0.47 < np.mean([view.flip for view in views]) < 0.53


def test_inceptions_boxes_have_its_areas_and_aspects() -> None:
    views = _views(Transform(augment="inception", image_size=224), 4000, 3000, 4000)
    boxes = np.array([view.box for view in views])
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    areas, aspects = widths * heights / 12e6, np.log(widths / heights)
    assert areas.min() > 0.079
    assert areas.max() <= 1
    # Where all shapes fit (half the area does), both are uniform.
    small = areas < 0.5
    assert np.mean(areas[small]) == pytest.approx((0.08 + 0.5) / 2, abs=0.01)
    assert np.mean(aspects[small]) == pytest.approx(0, abs=0.02)
    assert np.abs(aspects).max() < math.log(4 / 3) + 0.01
    assert aspects[small].std() == pytest.approx(2 * math.log(4 / 3) / math.sqrt(12), abs=0.01)


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [(1000, 10, (493, 0, 506, 10)), (10, 1000, (0, 493, 10, 506))],
)
def test_an_image_too_long_for_inception_gives_the_largest_centre_of_an_allowed_aspect(
    width: int, height: int, box: tuple[int, int, int, int]
) -> None:
    transform = Transform(augment="inception", image_size=224)
    largest_area = [0.0] * 6 + [1 - 1e-9, 0.5] * 10
    assert transform.view(width, height, largest_area).box == box


def test_pad_moves_the_whole_image_by_up_to_four_pixels_each_way() -> None:
    views = _views(Transform(augment="pad", image_size=32), 32, 32, 2000)
    assert {view.box for view in views} == {(0, 0, 32, 32)}
    assert {view.shift for view in views} == {(y, x) for y in range(-4, 5) for x in range(-4, 5)}
    assert 0.45 < np.mean([view.flip for view in views]) < 0.55


@pytest.mark.parametrize("train", [True, False])
def test_none_takes_the_centre_and_nothing_else(train: bool) -> None:
    transform = Transform(augment="none", image_size=32, train=train)
    assert _views(transform, 60, 40, 9) == [View(box=(10, 0, 50, 40), size=32)] * 9


@pytest.mark.parametrize(
    ("augment", "box"),
    [
        ("caffe2", (86, 23, 414, 351)),
        ("inception", (86, 23, 414, 351)),
        ("pad", (62, 0, 437, 375)),
        ("none", (62, 0, 437, 375)),
    ],
)
def test_evaluation_takes_the_centre_and_no_random_number(
    augment: Augment, box: tuple[int, int, int, int]
) -> None:
    transform = Transform(augment=augment, image_size=224, train=False, color_jitter=0.4)
    assert transform.draws == 0
    assert transform.view(500, 375, []) == View(box=box, size=224)


def test_colour_changes_only_where_it_is_asked_for() -> None:
    plain = _views(Transform(augment="caffe2", image_size=8), 20, 20, 200)
    jittery = _views(Transform(augment="caffe2", image_size=8, color_jitter=0.4), 20, 20, 200)
    assert {view.jitter for view in plain} == {None}
    assert [view.box for view in plain] == [view.box for view in jittery]
    factors = [view.jitter.saturation for view in jittery if view.jitter is not None]
    assert 0.6 <= min(factors) < 0.65
    assert 1.35 < max(factors) < 1.4
