"""Plots as SVG: of a run, each worker's share and the time of a step, by step; and of histograms.

samples a step │ one line a worker   ┊ a change of speed
ms a step      │ of both together    ┊
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT = 760, 70, 20
HEIGHTS, TOP, GAP = (190, 110), 30, 34  # of the panels
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
TICKS = 4


def picture(
    counts: Sequence[Sequence[int]],
    milliseconds: Sequence[float | None],
    changes: Mapping[int, str],
    names: Sequence[str],
) -> str:
    """Draw a run.

    Args:
        counts: (steps, workers), samples of each worker.
        milliseconds: (steps,), of each step; None: unknown.
        changes: what was changed before a step, by the step's number.
        names: (workers,).
    """
    panels = [
        ("samples a step", [list(each) for each in zip(*counts, strict=True)], names),
        ("ms a step", [list(milliseconds)], ("both",)),
    ]
    height = TOP + sum(HEIGHTS) + GAP + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    top = TOP
    for (label, lines, titles), tall in zip(panels, HEIGHTS, strict=True):
        parts += _panel(label, lines, titles, len(counts), top, tall)
        for step, what in changes.items():
            x = _x(step, len(counts))
            parts.append(_line(x, top, x, top + tall, "#555", dashed=True))
            if top == TOP:
                parts.append(_text(x, top - 8, what, "middle"))
        top += tall + GAP
    for step in range(0, len(counts) + 1, 10):
        parts.append(_text(_x(step, len(counts)), top - GAP + 16, str(step), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 6, "step", "middle"))
    return "\n".join([*parts, "</svg>", ""])


def bars(histograms: Mapping[str, Mapping[str, float]], bins: str, unit: str) -> str:
    """Draw histograms, a panel each.

    Args:
        histograms: by title, the values by the name of the bin.
        bins: what a bin is.
        unit: of the values.
    """
    tall = HEIGHTS[1]
    height = TOP + len(histograms) * (tall + 2 * GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    top = TOP
    for title, values in histograms.items():
        parts.append(_line(LEFT, top + tall, WIDTH - RIGHT, top + tall, "#333"))
        parts.append(_text(LEFT, top - 8, f"{title}: {unit}, by {bins}", "start"))
        wide = (WIDTH - LEFT - RIGHT) / max(8, len(values))
        for index, (name, value) in enumerate(values.items()):
            bar = (tall - 16) * value / max(values.values())
            left = LEFT + index * wide
            parts.append(
                f'<rect x="{left + 4:.1f}" y="{top + tall - bar:.1f}" width="{wide - 8:.1f}" '
                f'height="{bar:.1f}" fill="{COLOURS[0]}"/>'
            )
            middle = left + wide / 2
            parts.append(_text(middle, top + tall - bar - 3, f"{value:.0f}", "middle"))
            parts.append(_text(middle, top + tall + 16, name, "middle"))
        top += tall + 2 * GAP
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    label: str,
    lines: Sequence[Sequence[float | None]],
    names: Sequence[str],
    steps: int,
    top: float,
    tall: float,
) -> list[str]:
    largest = 1.05 * max(value for line in lines for value in line if value is not None)
    parts = [
        _line(LEFT, top, LEFT, top + tall, "#333"),
        _line(LEFT, top + tall, WIDTH - RIGHT, top + tall, "#333"),
        f'<text transform="translate(16 {top + tall / 2:.1f}) rotate(-90)" '
        f'text-anchor="middle">{escape(label)}</text>',
    ]
    for tick in range(TICKS + 1):
        y = top + tall * (1 - tick / TICKS)
        parts.append(_text(LEFT - 6, y + 4, f"{largest * tick / TICKS:.0f}", "end"))
    for index, (line, name) in enumerate(zip(lines, names, strict=True)):
        colour = COLOURS[index % len(COLOURS)] if len(lines) > 1 else "#333"
        points = " ".join(
            f"{_x(step + 0.5, steps):.1f},{top + tall * (1 - value / largest):.1f}"
            for step, value in enumerate(line)
            if value is not None
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        )
        parts.append(_text(LEFT + 8, top + 14 + 15 * index, name, "start", colour))
    return parts


def _x(step: float, steps: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / steps


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}"{dash}/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
