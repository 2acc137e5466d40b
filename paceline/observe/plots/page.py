"""Page of a plot: one HTML file that loads nothing, with the panels as inline SVG and their values.

It is as wide as the window, and light or dark as the browser is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from paceline.observe.plots.panels import panels_of, style, svg_of
from paceline.observe.plots.run_curves import RunCurves
from paceline.observe.progress_rate import duration

_STYLE = """\
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --rule: #d5d8dc; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6e9; --paper: #17191c; --rule: #3c4046; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 80rem; padding: 1rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 1.5rem 0 .5rem; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; list-style: none; }
.legend li { overflow-wrap: anywhere; }
.legend svg { width: 2rem; height: .6rem; margin-right: .4rem; }
.panels { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr)); }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figure svg text { font-family: system-ui, sans-serif !important; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal;
  min-width: 4rem; max-width: 20rem; overflow-wrap: anywhere; }
@media (max-width: 30rem) { figure svg text { font-size: 10px !important; } }
summary { cursor: pointer; margin-top: .75rem; overflow-wrap: anywhere; }
li { overflow-wrap: anywhere; }
"""


def page_of(
    curves: Sequence[RunCurves],
    names: Sequence[str],
    columns: Sequence[str],
    results: Sequence[Sequence[str]],
) -> str:
    """Make the page.

    Args:
        curves: of each run.
        names: of each run.
        columns: the names of the results.
        results: (runs, columns), as a table shows them.
    """
    title = escape(" · ".join(names))
    panels = (
        f"<figure><figcaption>{escape(panel.title)}</figcaption>"
        f"{svg_of(panel, curves, f'p{index}')}</figure>"
        for index, panel in enumerate(panels_of(curves))
    )
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{title}</h1>",
        '<ul class="legend">',
        *(_legend(index, name) for index, name in enumerate(names)),
        "</ul>",
        '<div class="panels">',
        *panels,
        "</div>",
        "<h2>Results</h2>",
        _table(("run", *columns), [(name, *row) for name, row in zip(names, results, strict=True)]),
        *_losses(curves, names),
        "<h2>Values</h2>",
        *(_values(one, name) for one, name in zip(curves, names, strict=True)),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _legend(index: int, name: str) -> str:
    colour, dash = style(index)
    pattern = {"-": "", "--": "6 3", "-.": "6 2 1 2", ":": "2 2"}[dash]
    line = (
        '<svg viewBox="0 0 32 8" aria-hidden="true"><line x1="0" y1="4" x2="32" y2="4" '
        f'stroke="{colour}" stroke-width="3" stroke-dasharray="{pattern}"/></svg>'
    )
    return f"<li>{line}{escape(name)}</li>"


def _losses(curves: Sequence[RunCurves], names: Sequence[str]) -> Iterator[str]:
    """Yield a list of the lost workers, which the panels mark, if there are any."""
    if not any(one.losses for one in curves):
        return
    yield "<h2>Lost workers, the dotted lines</h2>\n<ul>"
    for one, name in zip(curves, names, strict=True):
        for loss in one.losses:
            cause = "; ".join(loss.causes) or "the cause isn't recorded"
            yield f"<li>{escape(name)}, after {loss.epoch:.2f} epochs: {escape(cause)}</li>"
    yield "</ul>"


def _values(one: RunCurves, name: str) -> str:
    rows = [
        (
            str(epoch),
            duration(seconds),
            f"{loss:.4f}",
            "" if accuracy is None else f"{accuracy:.2%}",
            f"{speed:,.0f}",
        )
        for epoch, seconds, loss, accuracy, speed in zip(
            one.epochs, one.seconds, one.loss, one.accuracy, one.images_per_second, strict=True
        )
    ]
    epochs = _table(("epoch", "time", "loss", "test accuracy", "images/s"), rows)
    waits = ""
    if one.waits:
        cells = [
            (str(rank), f"{each.exchange:.1f}", f"{each.input:.1f}")
            for rank, each in one.waits.items()
        ]
        waits = _table(("rank", "waits for the exchange, ms a step", "for input"), cells)
    return f"<details><summary>{escape(name)}</summary>\n{epochs}\n{waits}</details>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n'
        "</tbody></table></div>"
    )
