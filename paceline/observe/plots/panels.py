"""Panels of a plot: one axes each, in which every run has its colour. Needs matplotlib."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.errors import ConfigError
from paceline.observe.plots.run_curves import RunCurves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision tell apart; the light ones are
# darker here, so that all can be seen on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#3a9bd9", "#8a6fd1", "#7f7f7f")
Dash = Literal["-", "--", "-.", ":"]
_DASHES: Sequence[Dash] = ("-", "--", "-.", ":")
_INK = "#010203"  # of text and axes: a page replaces it by the text's colour
_MARKED = 40  # rows of a curve, at most, that are marked one by one
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
_RANKS = 24  # bars, at most, that have a label each


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Panel of a plot: its title, and what draws it."""

    title: str
    draw: Callable[[Axes, Sequence[RunCurves]], None]


def require_matplotlib() -> None:
    """Require the package.

    Raises:
        ConfigError: it isn't installed; names the extra of Paceline that installs it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: run pip install 'paceline[plot]'.") from error


def panels_of(curves: Sequence[RunCurves]) -> list[Panel]:
    """Return the panels for some runs: only those for which a run has values."""
    tested = any(value is not None for one in curves for value in one.accuracy)
    panels = []
    for by, of in (("epoch", _by_epoch), ("time", _by_time)):
        panels.append(Panel(title=f"Training loss by {by}", draw=_lines("loss", of)))
        if tested:
            panels.append(Panel(title=f"Test accuracy by {by}, %", draw=_lines("accuracy", of)))
    speed = _lines("images_per_second", _by_epoch)
    panels.append(Panel(title="Images a second by epoch", draw=speed))
    if any(one.waits for one in curves):
        panels.append(Panel(title="Waits by rank, ms a step", draw=_draw_waits))
    return panels


def style(index: int) -> tuple[str, Dash]:
    """Return the colour and the dashes of a run, by its index among the plotted ones."""
    dashes = _DASHES[index // len(COLOURS) % len(_DASHES)]
    return COLOURS[index % len(COLOURS)], dashes


def png_of(curves: Sequence[RunCurves], names: Sequence[str]) -> bytes:
    """Draw all panels in one picture, two a row; return it as PNG."""
    with drawing():
        return _png_of(curves, names)


def _png_of(curves: Sequence[RunCurves], names: Sequence[str]) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels = panels_of(curves)
    rows = -(-len(panels) // 2)
    legend = -(-len(curves) // 3)
    figure = Figure(figsize=(11, 3.2 * rows + 0.3 * legend + 0.2), layout="constrained")
    axes = list(figure.subplots(rows, 2, squeeze=False).flat)
    for each in axes:
        each.set_visible(False)
    for panel, each in zip(panels, axes, strict=False):
        each.set_visible(True)
        each.set_title(panel.title, fontsize=11)
        panel.draw(each, curves)
    lines = [Line2D([], [], color=colour, linestyle=dash) for colour, dash in _styles(curves)]
    texts = [short_name(name) for name in names]
    if any(one.losses for one in curves):
        lines.append(Line2D([], [], color=_INK, linestyle=":"))
        texts.append("a worker was lost")
    figure.legend(lines, texts, loc="outside upper center", ncols=3, frameon=False)
    return saved(figure, "png")


def svg_of(panel: Panel, curves: Sequence[RunCurves], prefix: str) -> str:
    """Draw a panel alone; return an SVG element for a page, without a title.

    Args:
        prefix: of the element's ids, which no other element of the page has.
    """
    from matplotlib.figure import Figure

    with drawing():
        figure = Figure(figsize=(4.1, 2.6), layout="constrained")
        panel.draw(figure.subplots(), curves)
        text = saved(figure, "svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    text = re.sub(r'<svg (.*?)width="[^"]*" height="[^"]*"', r"<svg \1", text, count=1)
    return text.replace(_INK, "currentColor")


def _styles(curves: Sequence[RunCurves]) -> list[tuple[str, Dash]]:
    return [style(index) for index in range(len(curves))]


def short_name(name: str) -> str:
    """Return a name that fits a legend, which leaves out names with an underscore before them."""
    name = name if len(name) <= 32 else f"{name[:15]}…{name[-16:]}"
    return f"\u200a{name}" if name.startswith("_") else name


@contextmanager
def drawing() -> Iterator[None]:
    """Draw names as they are, and the text of an SVG as text."""
    from matplotlib import rc_context

    with warnings.catch_warnings(), rc_context({"svg.fonttype": "none", "text.parse_math": False}):
        warnings.simplefilter("ignore")  # a name may have characters that the font lacks
        yield


def saved(figure: Figure, form: str) -> bytes:
    """Return a figure as a file of a form: "png" or "svg"."""
    file = io.BytesIO()
    figure.savefig(file, format=form, dpi=120, transparent=form == "svg")
    return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """Axis of the curves: its label, and where a run is after a number of epochs."""

    label: str
    place: Callable[[RunCurves, float], float]


def _by_epoch(curves: Sequence[RunCurves]) -> _Axis:
    return _Axis(label="epoch", place=lambda one, epoch: epoch)


def _by_time(curves: Sequence[RunCurves]) -> _Axis:
    longest = max(one.seconds[-1] for one in curves)
    unit, name = next((pair for pair in _UNITS if longest >= 2 * pair[0]), _UNITS[-1])
    return _Axis(label=name, place=lambda one, epoch: one.seconds_at(epoch) / unit)


def _lines(
    name: str, axis_of: Callable[[Sequence[RunCurves]], _Axis]
) -> Callable[[Axes, Sequence[RunCurves]], None]:
    """Return what draws one value of all runs as lines."""
    factor = 100 if name == "accuracy" else 1

    def draw(axes: Axes, curves: Sequence[RunCurves]) -> None:
        from matplotlib.ticker import MaxNLocator

        axis = axis_of(curves)
        for one, (colour, dash) in zip(curves, _styles(curves), strict=True):
            known = [
                (axis.place(one, epoch), factor * value)
                for epoch, value in zip(one.epochs, getattr(one, name), strict=True)
                if value is not None
            ]
            at = [place for place, _ in known]
            values = [value for _, value in known]
            marker = "o" if len(known) <= _MARKED else ""
            axes.plot(at, values, dash, color=colour, marker=marker, markersize=3)
            for loss in one.losses:
                lost = axis.place(one, loss.epoch)
                axes.axvline(lost, color=colour, linestyle=":", linewidth=1.2)
        if name == "images_per_second":
            axes.set_ylim(bottom=0)
        axes.set_xlabel(axis.label)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=axis.label == "epoch"))
        _plain(axes)

    return draw


def _draw_waits(axes: Axes, curves: Sequence[RunCurves]) -> None:
    """Draw a bar for each rank of each run: the waits for input on those for the exchange."""
    at = 0.0
    places: list[float] = []
    labels: list[str] = []
    for one, (colour, _) in zip(curves, _styles(curves), strict=True):
        for rank, waits in one.waits.items():
            first = not places
            axes.bar(at, waits.exchange, color=colour, label="exchange" if first else None)
            axes.bar(
                at,
                waits.input,
                bottom=waits.exchange,
                color="none",
                edgecolor=colour,
                hatch="////",
                label="input" if first else None,
            )
            places.append(at)
            labels.append(str(rank))
            at += 1
        at += bool(one.waits)
    every = -(-len(places) // _RANKS)
    axes.set_xticks(places[::every], labels[::every])
    axes.set_xlim(-0.6, max(at - 1, 4))  # few bars aren't as wide as the panel
    axes.set_xlabel("rank")
    top = max(one.exchange + one.input for each in curves for one in each.waits.values())
    axes.set_ylim(0, 1.25 * top or 1)  # room for the legend
    axes.legend(frameon=False, loc="upper right", ncols=2, fontsize=8)
    _plain(axes)


def _plain(axes: Axes) -> None:
    """Draw text and axes in the ink, with a light grid and without a box."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_INK)
    axes.tick_params(colors=_INK, labelsize=8)
    axes.xaxis.label.set_color(_INK)
    axes.xaxis.label.set_fontsize(9)
    axes.grid(alpha=0.2, color=_INK, linewidth=0.6)
    axes.set_axisbelow(True)
    legend = axes.get_legend()
    if legend is not None:
        for text in legend.get_texts():
            text.set_color(_INK)
