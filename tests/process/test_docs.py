"""What the documents show is true: their commands run, their messages are said, their links lead.

The documents are followed as they stand, a section a test, in a folder that is what `make demo`
leaves (with fewer images) after the first sections of docs/start.md, which make the databases and
train a model.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.cli.main import main
from tests.harness.documents.document_reader import Reader, says
from tests.harness.documents.documents import LANGUAGES, Block, blocks, headings, links
from tests.harness.documents.read_folder import break_things, make_clone
from tests.harness.network.redis_server import redis_server
from tests.harness.processes.bad_inputs import answer as in_process
from tests.harness.processes.command import Command, run
from tests.harness.processes.fork_server import environment_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
START = ROOT / "docs/start.md"
ERRORS = [ROOT / f"docs/reference/errors-{when}.md" for when in ("at-the-start", "while-training")]
FIRST = ("Start", "Make the databases", "Look into a database", "Train a model")
MADE = ("commands", "api")
LONGEST = 400
SHOWN_ONLY = {
    "continuous integration runs it",
    "installs from an index",
    "takes minutes on an idle machine",
    "needs CIFAR-10 and a quarter of an hour",
    "needs CIFAR-10 and about half an hour",
    "needs CIFAR-10 and an hour and a half",
    "needs CIFAR-10, root and several hours",
    "needs a GPU",
    "needs Docker",
    "needs Kubernetes",
    "needs Slurm",
    "needs an etcd cluster",
}
HIDDEN = re.compile(r"^(\$ |(paceline \w+|resnet50_trainer) --)", re.MULTILINE)
ENDLESS = (
    *("train", "--train_data", "train-lmdb", "--num_labels", "10", "--model", "resnet20"),
    *("--image_size", "32", "--augment", "none", "--batch_size", "64"),
    *("--num_workers", "2", "--num_epochs", "100000", "--run_id", "hurt"),
)


def sections() -> Iterator[object]:
    for document in DOCUMENTS:
        found = dict.fromkeys(block.section for block in blocks(document) if block.runs)
        for section in found:
            if document != START or section not in FIRST:
                yield pytest.param(document, section, id=f"{document.stem}: {section}")


@pytest.fixture(scope="module")
def redis() -> Iterator[tuple[str, str]]:
    """A server without a password and one with it."""
    with redis_server() as free, redis_server("secret") as guarded:
        yield free, guarded


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder after `make demo`."""
    folder = tmp_path_factory.mktemp("clone")
    make_clone(folder)
    return folder


@pytest.fixture(scope="module")
def trained(clone: Path, redis: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder after the first sections of docs/start.md, and after some accidents."""
    folder = copied(clone, tmp_path_factory.mktemp("trained"))
    reader = Reader(folder, redis)
    for block in blocks(START):
        if block.section in FIRST:
            reader.follow(block)
    break_things(folder)
    return folder


def copied(folder: Path, where: Path) -> Path:
    return Path(shutil.copytree(folder, where / "clone", symlinks=True))


@pytest.mark.parametrize(("document", "section"), list(sections()))
def test_a_section_can_be_followed(
    document: Path,
    section: str,
    redis: tuple[str, str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = [block for block in blocks(document) if block.section == section and block.runs]
    start = "clone" if "in a fresh folder" in here[0].marks else "trained"
    folder = copied(request.getfixturevalue(start), tmp_path)
    monkeypatch.chdir(folder)
    reader = Reader(folder, redis)
    for block in here:
        if block.language == "console":
            answer(block, reader.here, folder, capfd)
        else:
            reader.follow(block)


def answer(
    block: Block, here: Callable[[str], str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run a console's commands, and check the answers.

    This process has torch already; a command that starts workers runs as a fork, which has it, too.
    """
    for command, expected in block.dialogue:
        words = shlex.split(here(command))
        assert words[0] == "paceline"
        if words[1] == "train":
            ended = run(*words[1:], folder=folder)
        else:
            ended = in_process(words[1:], capfd)
        assert ended.status == block.status, f"{command}\n{ended.text}"
        assert says(ended.text, expected), f"{command}\nsays\n{ended.text}\nand not\n{expected}"


def quoted(event: str) -> str:
    """What the pages of errors say that is said when something happens."""
    found = [block for page in ERRORS for block in blocks(page)]
    (text,) = [block.text for block in found if block.marks.get("happens") == event]
    return text


def stop(command: Command, rank: int, number: signal.Signals) -> None:
    """Send a signal to a worker."""
    for process in command.family():
        place = json.loads(environment_of(process).get("PACELINE_WORKER", "{}"))
        if place.get("local_rank") == rank:
            process.send_signal(number)


def test_a_run_without_its_rendezvous_and_a_worker_says_what_is_quoted(
    trained: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = copied(trained, tmp_path)
    monkeypatch.chdir(folder)
    with redis_server() as url:
        command = Command(*ENDLESS, "--redis_url", url, folder=folder)
        command.line_with("epoch 1/")
        assert main([*ENDLESS, "--redis_url", url]) == 2
        assert says(capfd.readouterr().err, quoted("the same command again"))
    lost = command.line_with("rendezvous is lost")
    assert says(lost, quoted("the rendezvous is lost"))
    stop(command, 0, signal.SIGSTOP)  # until the supervisor knows more than it
    stop(command, 1, signal.SIGKILL)
    assert says(command.line_with("SIGKILL"), quoted("a worker is killed"))
    stop(command, 0, signal.SIGCONT)
    assert says(command.line_with("SIGKILL"), quoted("the others continue"))
    command.send(signal.SIGTERM)
    assert command.wait().status == 143


def test_a_run_whose_worker_hangs_says_what_is_quoted(trained: Path, tmp_path: Path) -> None:
    words = (*ENDLESS, "--sync", "notified", "--timeout", "3", "--peer_timeout", "4")
    command = Command(*words, folder=copied(trained, tmp_path))
    command.line_with("epoch 1/")
    stop(command, 1, signal.SIGSTOP)
    said = command.line_with("has sent no heartbeat")
    assert says(said, quoted("a worker hangs"))
    command.send(signal.SIGTERM)
    assert command.wait().status == 143


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_what_is_only_shown_has_a_reason_and_nothing_hides(document: Path) -> None:
    for block in blocks(document):
        assert block.language in LANGUAGES, f"line {block.line}"
        assert block.marks.get("shown only", next(iter(SHOWN_ONLY))) in SHOWN_ONLY
        if block.language == "text":
            hidden = HIDDEN.search(block.text)
            assert not hidden, f"line {block.line}: commands belong in sh or console"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_links_lead_somewhere(document: Path) -> None:
    for link in links(document):
        path, _, heading = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert not heading or heading in headings(target), link


@pytest.mark.parametrize("name", MADE)
def test_made_pages_are_what_the_code_says(name: str) -> None:
    made = runpy.run_path(str(ROOT / f"docs/make_{name}.py"))["documents"]()
    for page, text in made.items():
        path = ROOT / f"docs/reference/{page}.md"
        assert path.read_text() == text, f"run python docs/make_{name}.py"


def test_no_page_is_longer_than_a_reader_stays() -> None:
    assert [page for page in DOCUMENTS if len(page.read_text().splitlines()) > LONGEST] == []
