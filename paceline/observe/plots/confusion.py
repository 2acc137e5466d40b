"""Picture of a confusion matrix: how many images of a class were taken for which. By matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.observe.plots.panels import drawing, saved, short_name

_NAMED = 60  # classes, at most, that are named
_COUNTED = 20  # classes, at most, whose cells have their counts
_DARK = 0.72  # share of a class from which on white has more contrast than black


def confusion_png(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> bytes:
    """Draw a confusion matrix, and return it as PNG.

    Args:
        matrix: (classes, classes), images of a class, the row, that were taken for another one.
        names: of the classes.
    """
    from matplotlib.figure import Figure

    shares = [[count / max(1, sum(row)) for count in row] for row in matrix]
    classes = range(len(names))
    with drawing():
        side = min(14.0, 3 + 0.45 * len(names))
        figure = Figure(figsize=(side, side * 0.9), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        axes.set_xlabel("taken for")
        axes.set_ylabel("class")
        if len(names) <= _NAMED:
            labels = [short_name(name) for name in names]
            axes.set_xticks(classes, labels, rotation=90 if len(names) > 5 else 0, fontsize=8)
            axes.set_yticks(classes, labels, fontsize=8)
        if len(names) <= _COUNTED:
            for label in classes:
                for other in classes:
                    colour = "white" if shares[label][other] > _DARK else "black"
                    count = matrix[label][other]
                    text = f"{count:,}" if count else ""
                    axes.text(
                        *(other, label, text), ha="center", va="center", color=colour, fontsize=8
                    )
        figure.colorbar(image, ax=axes, shrink=0.8, label="share of the class")
        return saved(figure, "png")
