"""A bucket's gradients are borrowed where they lie as their parameters, and copied otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.reduce.put_engine.gradient_views import GradientViews
from paceline.reduce.put_engine.layout import BucketSpec, Topology, lay_out

SHAPES = {"small": (20, 5), "matrix": (64, 80), "images": (16, 32, 3, 3), "last": (7,)}
LARGE = ["matrix", "images"]


def templates() -> list[Tensor]:
    """Make parameters of which the images' is channels-last."""
    tensors = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES.values()]
    return [t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for t in tensors]


def like_its_parameter(template: Tensor) -> Tensor:
    return torch.randn_like(template)


def otherwise_laid(template: Tensor) -> Tensor:
    """Lay its values in the reverse order of dimensions, and not as a view of anything."""
    strides = torch.empty(tuple(reversed(template.shape))).stride()[::-1]
    laid = torch.empty_strided(template.shape, strides, dtype=torch.float64)
    return laid.copy_(torch.randn(template.shape))


def view(template: Tensor) -> Tensor:
    return torch.randn_like(template).detach()[:]


def of_another_dtype(template: Tensor) -> Tensor:
    return torch.randn_like(template, dtype=torch.float32)


def values_of(gradient: Tensor | None, template: Tensor) -> Tensor:
    """Return a gradient's values in the order of its parameter's memory."""
    laid = torch.zeros_like(template)
    if gradient is not None:
        laid.copy_(gradient)
    return laid.as_strided((laid.numel(),), (1,))


@pytest.mark.parametrize(
    ("make", "borrowed"),
    [
        (like_its_parameter, LARGE),
        (otherwise_laid, []),
        (view, []),
        (of_another_dtype, []),
    ],
)
@pytest.mark.parametrize("missing", [(), ("small",), ("matrix", "last"), tuple(SHAPES)], ids=str)
def test_gradients_are_borrowed_only_where_they_lie_as_their_parameters(
    make: Callable[[Tensor], Tensor], borrowed: list[str], missing: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    spec = BucketSpec(lengths=tuple(t.numel() for t in templates()), dtype=torch.float64)
    (layout,) = lay_out([spec], Topology.of([1, 1])).buckets
    views = GradientViews(layout, templates(), list(SHAPES))
    for _ in range(2):  # the copies' memory is used again
        gradients = [
            None if name in missing else make(template)
            for name, template in zip(SHAPES, templates(), strict=True)
        ]
        local = views.local_gradients(gradients, 0.5)
        expected = [values_of(g, t) for g, t in zip(gradients, templates(), strict=True)]
        starts, stops = [p[0] for p in local.pieces], [p[1] for p in local.pieces]
        assert [*starts, layout.numel] == [0, *stops], "the pieces cover the bucket in order"
        assert torch.equal(torch.cat([values for *_, values in local.pieces]), torch.cat(expected))
        assert [name for name, *_ in local.borrowed] == [n for n in borrowed if n not in missing]
        assert local.flags.tolist() == [name not in missing for name in SHAPES]
        assert local.full is (not missing)


def shared_views(*, adopts: bool = True) -> tuple[GradientViews, Tensor]:
    """Make views over memory that other ranks read; return its values, too."""
    lengths = tuple(t.numel() for t in templates())
    spec = BucketSpec(lengths=lengths, dtype=torch.float64, adopts=adopts)
    (layout,) = lay_out([spec], Topology.of([2])).buckets
    memory = torch.full((layout.numel,), torch.nan, dtype=torch.float64)
    return GradientViews(layout, templates(), list(SHAPES), memory.view(torch.uint8)), memory


def test_large_gradients_move_to_shared_memory_and_small_ones_are_copied_there() -> None:
    views, memory = shared_views()
    for _ in range(2):
        gradients = [like_its_parameter(template) for template in templates()]
        before = [gradient.data_ptr() for gradient in gradients]
        values = [values_of(g, t) for g, t in zip(gradients, templates(), strict=True)]
        versions = [gradient._version for gradient in gradients]
        local = views.local_gradients(gradients, 0.5)
        assert torch.equal(memory, torch.cat(values))
        assert torch.equal(torch.cat([piece for *_, piece in local.pieces]), memory)
        now = [values_of(g, t) for g, t in zip(gradients, templates(), strict=True)]
        assert torch.equal(torch.cat(now), memory)
        assert [gradient._version for gradient in gradients] == versions
        moved = [g.data_ptr() != at for g, at in zip(gradients, before, strict=True)]
        assert moved == [name in LARGE for name in SHAPES]
        begin = memory.data_ptr()
        for gradient, template, has_moved in zip(gradients, templates(), moved, strict=True):
            inside = begin <= gradient.data_ptr() < begin + memory.nbytes
            assert inside is has_moved
            assert gradient.stride() == template.stride()
            assert gradient.untyped_storage().nbytes() == gradient.nbytes, "not the whole window"


def test_a_gradient_that_stays_is_sent_from_where_it_is() -> None:
    views, memory = shared_views()
    gradients = [like_its_parameter(template) for template in templates()]
    views.local_gradients(gradients, 1.0)
    places = [gradient.data_ptr() for gradient in gradients]
    for gradient in gradients:
        gradient += 1  # as backward adds to it
    expected = torch.cat([values_of(g, t) for g, t in zip(gradients, templates(), strict=True)])
    views.local_gradients(gradients, 1.0)
    assert [gradient.data_ptr() for gradient in gradients] == places
    assert torch.equal(memory, expected)


def test_what_a_hook_has_kept_of_an_earlier_step_stays_as_it_was() -> None:
    views, _ = shared_views()
    kept = [like_its_parameter(template) for template in templates()]
    noted = [gradient.clone() for gradient in kept]
    views.local_gradients(kept, 1.0)
    views.local_gradients([like_its_parameter(template) for template in templates()], 1.0)
    assert all(torch.equal(gradient, was) for gradient, was in zip(kept, noted, strict=True))
    views.local_gradients([None] * len(SHAPES), 1.0)
    assert all(torch.equal(gradient, was) for gradient, was in zip(kept, noted, strict=True))


@pytest.mark.parametrize("adopts", [True, False])
def test_a_gradient_doesnt_move_where_nobody_reads_it_or_where_more_refers_to_it(
    adopts: bool,
) -> None:
    views, memory = shared_views(adopts=adopts)
    gradients = [like_its_parameter(template) for template in templates()]
    before = [gradient.data_ptr() for gradient in gradients]
    views.local_gradients(gradients, 0.0)
    assert [gradient.data_ptr() for gradient in gradients] == before
    for gradient in gradients:
        gradient.requires_grad_(adopts)  # of a second order
    local = views.local_gradients(gradients, 1.0)
    assert [gradient.data_ptr() for gradient in gradients] == before
    expected = torch.cat([values_of(g, t) for g, t in zip(gradients, templates(), strict=True)])
    assert torch.equal(torch.cat([piece for *_, piece in local.pieces]), expected)
    assert memory.isnan().any()
