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
