"""`paceline predict RUN IMAGES`: classifies image files with the model of a run.

The status is 0, or 1 if an image couldn't be read; the others are classified all the same.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from rich.console import Console

from paceline.cli.active_run.find_run import find_run_or_weights
from paceline.cli.flags import parse
from paceline.cli.progress import meter
from paceline.cluster.supervision.allocator import keep_freed_memory
from paceline.config.predict import PredictConfig
from paceline.data.image.image_paths import find_images
from paceline.data.ordered_map import Meter
from paceline.errors import many
from paceline.inference.predictions import Prediction, predict
from paceline.inference.trained_model import TrainedModel

_DESCRIPTION = """\
Classify image files with the model of a run.

The exit status is 1 if an image can't be read; the others are classified.

Examples:
  paceline predict digits photo.jpg
  paceline predict runs/digits photos --top 1 --csv > photos.csv
  find photos -name '*.jpg' -newer last | paceline predict digits - --json"""

_Print = Callable[[Prediction], None]


def main(argv: Sequence[str]) -> int:
    """Run the command after `paceline predict`; return its exit status.

    Raises:
        ConfigError: there is no such run, or no such image, or the run has no weights.
        PacelineError: a file can't be read.
        SystemExit: help was requested (0), or the arguments are wrong (2).
    """
    config = parse(PredictConfig, argv, prog="paceline predict", description=_DESCRIPTION)
    keep_freed_memory()  # each batch takes the memory of the last one's activations
    folder, file = find_run_or_weights(config.run, Path(config.output_dir))
    paths = [*_paths(config.images)]
    cuda = torch.cuda.is_available() and not config.use_cpu
    device = torch.device("cuda" if cuda else "cpu")
    trained = TrainedModel.read(folder, device, config.weights or file)
    show = _printer(config, trained.names)
    unread = 0
    predictions = predict(
        trained,
        paths,
        top=config.top,
        batch_size=config.batch_size,
        workers=config.decode_workers,
    )
    with closing(predictions), _progress() as shown:
        for number, one in enumerate(predictions, 1):
            if one.error is not None:
                unread += 1
                print(f"paceline: {one.error}", file=sys.stderr)
            else:
                show(one)
            shown(number, len(paths))
    if not paths:
        print("paceline: standard input names no image.", file=sys.stderr)
    if unread:
        print(
            f"paceline: {unread:,} of {many(len(paths), 'image')} couldn't be read.",
            file=sys.stderr,
        )
    return 1 if unread else 0


def _paths(words: Sequence[str]) -> Iterator[str]:
    """Yield the paths of images; of those of a list, one that isn't there is no mistake."""
    for word in words:
        if word != "-":
            yield from find_images([word])
            continue
        for line in sys.stdin:
            if path := line.rstrip("\n"):
                yield from find_images([path]) if Path(path).is_dir() else [path]


@contextmanager
def _progress() -> Iterator[Meter]:
    """Show the progress on a terminal that doesn't show the predictions themselves."""
    console = Console(stderr=True)
    if sys.stdout.isatty() or not console.is_terminal:
        yield lambda done, total: None
        return
    with meter("Predicting", "images", console) as shown:
        yield shown


def _printer(config: PredictConfig, names: Sequence[str]) -> _Print:
    if config.json:
        return lambda one: print(json.dumps(_as_json(one, names)))
    if config.csv:
        return _csv_printer(min(config.top, len(names)), names)
    return lambda one: print(_as_text(one, names))


def _as_text(one: Prediction, names: Sequence[str]) -> str:
    pairs = zip(one.labels, one.probabilities, strict=True)
    classes = "  ".join(f"{names[label]} {share:.1%}" for label, share in pairs)
    return f"{one.path}: {classes}"


def _as_json(one: Prediction, names: Sequence[str]) -> dict[str, object]:
    classes = [
        {"class": names[label], "label": label, "probability": round(share, 6)}
        for label, share in zip(one.labels, one.probabilities, strict=True)
    ]
    return {"image": one.path, "classes": classes}


def _csv_printer(top: int, names: Sequence[str]) -> _Print:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    columns = [column for n in range(1, top + 1) for column in (f"class_{n}", f"probability_{n}")]
    writer.writerow(["image", *columns])

    def show(one: Prediction) -> None:
        pairs = zip(one.labels, one.probabilities, strict=True)
        values = [value for label, share in pairs for value in (names[label], f"{share:.6f}")]
        writer.writerow([one.path, *values])

    return show
