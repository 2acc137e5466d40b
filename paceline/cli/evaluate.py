"""`paceline evaluate RUN --test_data DB`: loss, accuracies and mistakes of a run's model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from rich.console import Console

from paceline.cli.active_run.find_run import find_run_or_weights
from paceline.cli.flags import parse
from paceline.cli.output_file import check_output, write_output
from paceline.cli.progress import meter
from paceline.cli.run_images import open_test_data
from paceline.cli.tables import table_console, table_of
from paceline.cluster.supervision.allocator import keep_freed_memory
from paceline.config.evaluate import EvaluateConfig
from paceline.errors import ConfigError, Message
from paceline.inference.evaluation import Evaluation, evaluate, most_confused
from paceline.inference.trained_model import TrainedModel
from paceline.observe.event_file import find_event_files, read_events
from paceline.observe.plots.confusion import confusion_png
from paceline.observe.plots.panels import require_matplotlib
from paceline.session.sources import order_of

_DESCRIPTION = """\
Evaluate the model of a run on a database of images.

With the database and the device of the run's own evaluations, the result is theirs.

Examples:
  paceline evaluate digits
  paceline evaluate runs/digits --test_data other-lmdb --weights last --confusion
  paceline evaluate digits --confusion_png confusion.png
  paceline evaluate runs/digits/resnet20_model.pt --test_data test-lmdb --json"""

_WIDEST = 30  # classes of a printed matrix


def main(argv: Sequence[str]) -> int:
    """Run the command after `paceline evaluate`; return its exit status.

    Raises:
        ConfigError: there is no such run or database, or the run has no weights.
        PacelineError: a file or a record can't be read.
        SystemExit: help was requested (0), or the arguments are wrong (2).
    """
    config = parse(EvaluateConfig, argv, prog="paceline evaluate", description=_DESCRIPTION)
    if config.confusion_png:
        check_output("confusion_png", config.confusion_png)
        require_matplotlib()
    keep_freed_memory()  # each batch takes the memory of the last one's activations
    folder, file = find_run_or_weights(config.run, Path(config.output_dir))
    cuda = torch.cuda.is_available() and not config.use_cpu
    device = torch.device("cuda" if cuda else "cpu")
    trained = TrainedModel.read(folder, device, config.weights or file)
    workers = config.run_workers or trained.workers or _workers_of(folder)
    source = open_test_data(trained.config, folder, config.test_data)
    with closing(source), meter("Evaluating", "images", Console(stderr=True)) as shown:
        _require_classes(config, source.label_names, trained)
        result = evaluate(
            trained,
            source,
            order_of(trained.config, len(source), train=False),
            workers=workers,
            decode_workers=config.decode_workers,
            meter=shown,
        )
    if config.confusion_png:
        picture = confusion_png(result.confusion.tolist(), trained.names)
        write_output("confusion_png", config.confusion_png, picture)
        print(f"paceline: {config.confusion_png} has the confusion matrix.", file=sys.stderr)
    if config.json:
        print(json.dumps(_as_json(result, trained.names)))
    else:
        _print(result, trained.names, config, table_console())
    return 0


def _workers_of(folder: Path | None) -> int:
    """Return how many workers the run's last generation had; 1 where no event says so."""
    newest = (-1, 1)
    for _, path in find_event_files(folder) if folder is not None else ():
        for event in read_events(path):
            if event.get("event") == "run":
                newest = max(newest, (event["generation"], event["world_size"]))
    return newest[1]


def _require_classes(
    config: EvaluateConfig, names: Sequence[str] | None, trained: TrainedModel
) -> None:
    known = trained.classes
    if known is not None and names is not None and tuple(names) != tuple(known):
        raise ConfigError(
            Message(
                "{--test_data} {}: its classes, {}, aren't those of the run, {}; create it from "
                "folders of the same classes.",
                config.test_data,
                _some(names),
                _some(known),
            )
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f", … ({len(names)})" if len(names) > 5 else "")


def _as_json(result: Evaluation, names: Sequence[str]) -> dict[str, object]:
    matrix = result.confusion.tolist()
    scores = result.scores
    return {
        "images": scores.samples,
        "loss": scores.loss,
        "accuracy": scores.accuracy,
        "top5": scores.top5,
        "classes": [
            {"class": name, "images": sum(row), "right": row[label]}
            for label, (name, row) in enumerate(zip(names, matrix, strict=True))
        ],
        "confusion": matrix,
    }


def _print(
    result: Evaluation, names: Sequence[str], config: EvaluateConfig, console: Console
) -> None:
    scores = result.scores
    top5 = f", top-5 {scores.top5:.2%}" if len(names) > 5 else ""  # otherwise it is 100%
    console.print(
        f"{scores.samples:,} images: loss {scores.loss:.4f}, accuracy {scores.accuracy:.2%}{top5}"
    )
    table = table_of("class", "images", "right", "taken for")
    matrix = result.confusion.tolist()
    for label, row in enumerate(matrix):
        if count := sum(row):
            other = most_confused(row, label)
            taken = "" if other is None else f"{names[other]} ({row[other]:,})"
            table.add_row(names[label], f"{count:,}", f"{row[label] / count:.1%}", taken)
    console.print(table)
    if config.confusion:
        _print_matrix(matrix, names, console)


def _print_matrix(matrix: Sequence[Sequence[int]], names: Sequence[str], console: Console) -> None:
    if len(names) > _WIDEST:
        console.print(f"The matrix of {len(names):,} classes is too wide to print: use --json.")
        return
    console.print("Images of a class, the row, that were taken for which one, the column:")
    table = table_of("", *(str(label) for label in range(len(names))))
    for label, row in enumerate(matrix):
        table.add_row(f"{label} {names[label]}", *(str(count or "") for count in row))
    console.print(table)
