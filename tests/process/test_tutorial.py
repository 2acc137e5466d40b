"""The tutorial's cells run, and what they show is what the text around them says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

from tests.harness.processes.fork_server import server

NOTEBOOK = Path(__file__).parents[2] / "docs/tutorial-synchronous-sgd.ipynb"
LOSSES = re.compile(r"epoch \d: loss (\d+\.\d+)")

pytestmark = pytest.mark.timeout(
    300
)  # the first test runs all cells, for a minute where it is busy


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run all cells; return the text that each shows, by the cell's last heading and its number."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # The kernel is a process of its own; what its cells start is forked.
    environment = {
        **os.environ,
        "PATH": f"{server().proxies}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(tmp_path_factory.mktemp("ipython")),
        "MPLCONFIGDIR": str(tmp_path_factory.mktemp("matplotlib")),
    }
    where = tmp_path_factory.mktemp("tutorial")
    config = Config({"KernelManager": {"transport": "ipc", "ip": f"{where}/kernel"}})
    client = NotebookClient(
        notebook, timeout=280, resources={"metadata": {"path": str(where)}}, config=config
    )
    client.execute(env=environment)
    texts: dict[str, str] = {}
    heading = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            heading = [heading, *re.findall(r"^##? (.*)", cell.source, re.MULTILINE)][-1]
            continue
        text = "".join(output.get("text", "") for output in cell.outputs)
        pictures = sum("image/png" in output.get("data", {}) for output in cell.outputs)
        texts[heading] = texts.get(heading, "") + text + "picture\n" * pictures
    return texts


def losses(text: str) -> list[float]:
    return [float(loss) for loss in LOSSES.findall(text)]


def test_the_losses_are_the_same_with_any_number_of_workers(shown: dict[str, str]) -> None:
    alone = losses(shown["One process"])
    assert len(alone) == 6
    for heading in ("Four workers", "Two machines", "A worker is killed"):
        assert losses(shown[heading]) == pytest.approx(alone, abs=1e-9), shown[heading]


def test_a_killed_worker_changes_no_count_of_the_ledger(shown: dict[str, str]) -> None:
    text = shown["A worker is killed"]
    assert "rank 3 on machine 0" in text
    assert "killed by SIGKILL" in text
    assert "each sample was trained exactly once, in 72 steps" in text


def test_curves_timeline_and_photographs_are_pictures(shown: dict[str, str]) -> None:
    headings = [heading for heading, text in shown.items() for _ in range(text.count("picture\n"))]
    assert headings == [
        *["Why the learning rate scales"] * 2,
        *("What a step does", "Your own photographs"),
    ]


def test_a_server_that_waits_is_exact_and_other_ways_train(shown: dict[str, str]) -> None:
    rows = re.findall(
        r"^(.*?) +(\d+\.\d+) +(\d+\.\d+)  [\d.]+% right$",
        shown["Averaging and servers"],
        re.MULTILINE,
    )
    last = {way: float(loss) for way, _, loss in rows}
    assert len(last) == 5
    assert last["server"] == last["all-reduce"] == round(losses(shown["One process"])[-1], 3)


def test_the_stored_outputs_are_those_of_the_cells(shown: dict[str, str]) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    pictures = [output for cell in cells for output in cell.outputs if "data" in output]
    texts = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert len(pictures) == 4
    assert losses(texts)[:6] == pytest.approx(losses(shown["One process"]), abs=1e-9)
    assert NOTEBOOK.stat().st_size < 500_000
