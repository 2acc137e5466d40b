"""`paceline plot`: the curves are those of log and event files; the page needs no other file."""

from __future__ import annotations

import io
import json
import math
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from paceline.cli.active_run.summaries import summary_of
from paceline.cli.main import main
from paceline.observe.plots.panels import panels_of
from paceline.observe.plots.run_curves import RankWaits, RunCurves, WorkerLoss
from tests.harness.library.finished_run import write_logged_run

ROWS = [
    "10.0,10.0,500,500,20,50,0.5,0,0.1,1.5,0.75",
    "15.0,30.0,500,1000,40,25,0.5,1,0.1,1.25,0.625",
]
ODD = "_odd $name <b>&amp;"


def lines_of(rank: int) -> list[dict[str, Any]]:
    """Return the events of a rank, of which rank 1 is lost at step 30."""
    start = {"event": "run", "generation": 0, "rank": rank, "steps": 20}
    waits = ({"exposed_ms": 2.0 + rank, "wait_input_ms": 1.0}, {"exposed_ms": 4.0 + rank})
    steps = [{"event": "step", "generation": 0, "step": 28 + n, **w} for n, w in enumerate(waits)]
    change = {"generation": 1, "start": 30, "lost": ["a-1"], "causes": ["rank 1 was <killed>"]}
    return [start, *steps, *([] if rank else [{"event": "change", **change}])]


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, the second of one epoch and without test data, and one without an epoch."""
    monkeypatch.chdir(tmp_path)
    write_logged_run(Path("runs/first"), 0.5, ROWS, finished=True)
    for rank in (0, 1):
        text = "".join(f"{json.dumps(event)}\n" for event in lines_of(rank))
        Path(f"runs/first/events.a-{rank}.jsonl").write_text(text)
    write_logged_run(Path("runs") / ODD, 0.5, [ROWS[0].replace("0.75", "-1")], finished=False)
    write_logged_run(Path("runs/new"), 0.5, [], finished=False)
    Path("runs/notes").mkdir()
    return tmp_path


def curves_of(name: str) -> RunCurves:
    folder = Path("runs", name)
    return RunCurves.of_folder(folder, summary_of(folder))


def test_curves_are_those_of_log_and_events() -> None:
    first = curves_of("first")
    assert first.epochs == [1, 2]
    assert first.seconds == [10.0, 30.0]
    assert (first.loss, first.accuracy) == ([1.5, 1.25], [0.75, 0.625])
    assert first.images_per_second == [50.0, 25.0]
    assert first.waits == {
        0: RankWaits(input=0.5, exchange=3.0),
        1: RankWaits(input=0.5, exchange=4.0),
    }
    assert first.losses == [WorkerLoss(epoch=1.5, causes=("rank 1 was <killed>",))]
    assert [first.seconds_at(epoch) for epoch in (0.5, 1, 1.5, 2, 3)] == [5, 10, 20, 30, 30]
    assert curves_of(ODD).accuracy == [None]


def test_panels_have_all_runs_on_the_same_axes_and_mark_the_losses() -> None:
    from matplotlib.figure import Figure  # a second, which no other test takes

    curves = [curves_of("first"), curves_of(ODD)]
    drawn = {}
    for panel in panels_of(curves):
        axes = Figure().subplots()
        panel.draw(axes, curves)
        drawn[panel.title] = [line.get_xydata().tolist() for line in axes.lines]  # type: ignore[union-attr]
    first, lost, other = drawn["Training loss by time"]
    assert first == [[10, 1.5], [30, 1.25]]
    assert lost == [[20, 0], [20, 1]]  # from the bottom of the axes to their top
    assert other == [[10, 1.5]]
    assert drawn["Test accuracy by epoch, %"][::2] == [[[1, 75], [2, 62.5]], []]
    assert drawn["Images a second by epoch"][0] == [[1, 50], [2, 25]]
    assert list(drawn)[-1] == "Waits by rank, ms a step"
    assert not any("accuracy" in panel.title for panel in panels_of([curves[1]]))


def test_a_picture_is_written(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    assert main(["plot", "first", ODD, "--output", "both.PNG"]) == 0
    assert capsys.readouterr().out == "both.PNG: 2 runs.\n"
    image = Image.open(io.BytesIO((runs / "both.PNG").read_bytes())).convert("RGB")
    assert image.width == 1320
    colours = {colour for _, colour in image.getcolors(1 << 24)}  # type: ignore[union-attr]
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= colours  # one of each run


class Page(HTMLParser):
    """What a page has: its elements' ids and references, and the cells of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.references: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids[str(value)] += 1
            if name in ("href", "xlink:href", "src", "srcset", "data"):
                self.references.append(str(value))

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_a_page_is_one_file_with_all_panels_and_their_values(runs: Path) -> None:
    assert main(["plot", "first", ODD, "--output", "both.html"]) == 0
    text = (runs / "both.html").read_text()
    page = Page(text)
    assert page.tags["figure"] == 6
    assert not {"script", "link", "img", "iframe"} & page.tags.keys()
    assert not {"@import", "@font-face", "http-equiv"} & set(text.split())
    assert all(one.startswith("#") and one[1:] in page.ids for one in page.references)
    assert set(page.ids.values()) == {1}
    assert page.texts.count(ODD) >= 3  # legend, results, values
    assert "first, after 1.50 epochs: rank 1 was <killed>" in page.texts
    for cell in ("1.2500", "75.00%", "0:30", "finished", "4.0"):
        assert cell in page.texts


def test_values_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "first", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["loss"], found["summary"]["run"]) == ([1.5, 1.25], "first")
    assert math.isclose(found["waits"]["1"]["exchange"], 4)
    assert not Path("plot.png").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "A run is required, as in paceline plot runs/my-run."),
        ("none", "none is neither a run folder nor the id of a run"),
        ("first new", "/runs/new: no epoch of this run is complete, so there is nothing to plot."),
        ("first --output plot.pdf", "--output plot.pdf: must end in .png or .html"),
        ("first --output plot", "--output plot: must end in .png or .html"),
        ("notes", "notes is neither a run folder nor the id of a run"),
        ("first --output no/plot.png", "--output no/plot.png: it can't be written (No such file"),
        ("first --output page.html/", "--output page.html/: must end in .png or .html"),
    ],
)
def test_bad_input_is_a_sentence_and_writes_nothing(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str], runs: Path
) -> None:
    assert main(["plot", *words.split()]) == 2
    assert sentence in capsys.readouterr().err
    assert [path.name for path in runs.iterdir()] == ["runs"]


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", "first"]) == 2
    assert "pictures need matplotlib: run pip install 'paceline[plot]'." in capsys.readouterr().err
