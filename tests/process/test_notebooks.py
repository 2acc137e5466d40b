"""Notebooks: cells that run twice, that are interrupted, and that start workers."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest

from paceline.cli.main import main
from tests.harness.processes.command import all_end
from tests.harness.processes.notebook import Notebook, run

STEPS = 5  # of an epoch

JOIN = """
import os, signal, threading
import torch
import paceline
from tests.harness.library.small_training import *

world = paceline.join("run", seed=SEED)
model = network(norm=True, dropout=0.3)
optimizer = sgd(model)
paceline.parallelize(model, optimizer, world)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
world.track(schedule)
train = paceline.loader(samples(), BATCH, world)

reader, writer = os.pipe()
os.set_blocking(writer, False)

def await_interrupt(where):
    # The kernel writes into the pipe when a signal comes, before Python handles it.
    signal.set_wakeup_fd(writer)
    print(where, world.steps, flush=True)
    os.read(reader, 1)
    signal.set_wakeup_fd(-1)

def nothing(where):
    pass
"""
# The model and the optimizer of an earlier cell are used again.
JOIN_AGAIN = JOIN.replace("model = network", "network").replace("optimizer = sgd", "sgd")
LOOP = """
for epoch in range(train.epoch, EPOCHS):
    for x, y in train:
        at("before step")
        number = world.steps
        with world.step():
            loss = loss_of(model, x, y)
            loss.backward()
            at("in step")
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {number}: {loss.item().hex()}", flush=True)
    at("after epoch")
    schedule.step()
    print("rate", schedule.get_last_lr(), flush=True)
    at("after schedule")
"""


def epochs(count: int, at: str = "nothing") -> str:
    """The start of a cell: how many epochs, and what is called at each moment."""
    return f"EPOCHS = {count}\nat = lambda where: {at}\n"


def interrupted(moment: str, step: int, how: str = "await_interrupt(where)") -> str:
    """Call `how` at a moment."""
    return f"{how} if (where, world.steps) == ({moment!r}, {step}) else None"


def losses(text: str) -> dict[int, str]:
    """Read the losses; each step counts once, the last time."""
    return {int(step): loss for step, loss in re.findall(r"^step (\d+): (\S+)$", text, re.M)}


def made(text: str) -> list[int]:
    """Read which steps were made, in this order."""
    return [int(step) for step in re.findall(r"^step (\d+): ", text, re.M)]


def rates(text: str) -> list[str]:
    return re.findall(r"^rate \[(.*)\]$", text, re.M)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of three epochs in one cell that nothing interrupts."""
    ended = run(JOIN + epochs(3) + LOOP, folder=tmp_path_factory.mktemp("whole"))
    assert ended.text.count("cell 0: done") == 1, ended.text
    assert made(ended.text) == list(range(3 * STEPS))
    assert rates(ended.text) == ["0.05", "0.025", "0.0125"]
    return losses(ended.text)


def assert_exact(folder: Path, capsys: pytest.CaptureFixture[str], steps: int) -> None:
    assert main(["ledger", str(folder / "run")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Exact: each sample was trained exactly once, in {steps} steps" in said


def test_a_cell_that_runs_again_loses_nothing(
    whole: dict[int, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = JOIN + epochs(2) + LOOP
    ended = run(cell, cell, cell.replace(epochs(2), epochs(3)), folder=tmp_path)
    assert ended.status == 0
    assert made(ended.text) == list(range(3 * STEPS)), ended.text
    assert losses(ended.text) == whole
    assert rates(ended.text) == ["0.05", "0.025", "0.0125"]
    told = "paceline: the world that was still open is closed; its state after 10 steps is saved in"
    assert ended.text.count(f"{told} run.\n") == 2
    assert_exact(tmp_path, capsys, 15)


def test_a_world_that_is_closed_can_be_joined_again(
    whole: dict[int, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    close = "world.close()\nworld.close()"
    cells = (JOIN, epochs(1) + LOOP, close, JOIN, epochs(3) + LOOP, close)
    ended = run(*cells, folder=tmp_path)
    assert made(ended.text) == list(range(3 * STEPS)), ended.text
    assert losses(ended.text) == whole
    assert "still open" not in ended.text
    assert_exact(tmp_path, capsys, 15)


def interrupt(notebook: Notebook, moment: str) -> str:
    notebook.line_with(moment)
    notebook.send(signal.SIGINT)
    return notebook.wait().text


def test_an_interrupt_in_a_step_takes_effect_after_it(
    whole: dict[int, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = JOIN + epochs(3, interrupted("in step", 7)) + LOOP
    notebook = Notebook(first, JOIN + epochs(3) + LOOP, folder=tmp_path)
    text = interrupt(notebook, "in step 7")
    assert "cell 0: KeyboardInterrupt\n" in text
    told = "paceline: the state after 8 steps is saved in run, and the next paceline.join() resumes"
    assert text.count(f"{told} it.\n") == 1
    assert made(text) == list(range(8, 15)), text
    assert losses(text).items() <= whole.items()
    assert "cell 1: done\n" in text
    assert_exact(tmp_path, capsys, 15)


@pytest.mark.parametrize("again", ["the loop's cell", "both cells"])
@pytest.mark.parametrize("step", [7, 9])
def test_an_interrupt_between_two_steps_loses_no_sample(
    whole: dict[int, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    again: str,
    step: int,
) -> None:
    first = epochs(3, interrupted("before step", step)) + LOOP
    repeated = [JOIN] if again == "both cells" else []
    cells = (JOIN, first, *repeated, epochs(3) + LOOP)
    text = interrupt(Notebook(*cells, folder=tmp_path), f"before step {step}")
    assert "cell 1: KeyboardInterrupt\n" in text
    assert made(text) == list(range(step, 15)), text
    assert losses(text).items() <= whole.items()
    assert rates(text) == ["0.025", "0.0125"]
    assert_exact(tmp_path, capsys, 15)


def test_an_interrupt_ends_a_long_step_which_is_repeated(
    whole: dict[int, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wait = "(print(where, world.steps, flush=True), threading.Event().wait(60))"
    first = JOIN + epochs(3, interrupted("in step", 7, wait)) + LOOP
    text = interrupt(Notebook(first, JOIN_AGAIN + epochs(3) + LOOP, folder=tmp_path), "in step 7")
    assert "cell 0: KeyboardInterrupt\n" in text
    assert "cell 1: done\n" in text
    repeated = made(text)
    assert repeated == list(range(repeated[0], 15)), text
    assert 4 <= repeated[0] <= 7
    assert losses(text).items() <= whole.items()
    assert_exact(tmp_path, capsys, 15)


@pytest.mark.parametrize("moment", ["after epoch", "after schedule"])
def test_an_error_in_an_evaluation_repeats_the_epochs_end(
    whole: dict[int, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], moment: str
) -> None:
    first = JOIN + epochs(3, interrupted(moment, 10, "undefined")) + LOOP
    ended = run(first, JOIN + epochs(3) + LOOP, folder=tmp_path)
    assert "cell 0: NameError\n" in ended.text
    assert made(ended.text) == list(range(15)), ended.text
    assert losses(ended.text) == whole
    assert sorted(set(rates(ended.text)), reverse=True) == ["0.05", "0.025", "0.0125"]
    assert rates(ended.text)[-2:] == ["0.025", "0.0125"]
    assert_exact(tmp_path, capsys, 15)


def test_an_error_in_a_step_repeats_few_steps(
    whole: dict[int, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = JOIN + epochs(3, interrupted("in step", 9, "undefined")) + LOOP
    ended = run(first, epochs(3) + LOOP, JOIN_AGAIN + epochs(3) + LOOP, folder=tmp_path)
    assert "cell 0: NameError\n" in ended.text
    assert "world.step() was called after an error inside a step: close() the world" in ended.text
    assert "cell 1: ConfigError\n" in ended.text
    repeated = made(ended.text)[9:]
    assert 5 < repeated[0] <= 9, ended.text  # 5: the checkpoint at the end of the epoch
    assert repeated == list(range(repeated[0], 15))
    assert losses(ended.text) == whole
    assert_exact(tmp_path, capsys, 15)


ACCUMULATE = """
half = len(range(0, 50, BATCH)) // 2
for epoch in range(train.epoch, EPOCHS):
    for x, y in train:
        if train.step % 2 == 0 and train.step + 1 < len(train):
            with world.no_sync():
                (loss_of(model, x, y) / 2).backward()
            at("accumulated")
            continue
        number = world.steps
        with world.step():
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {number}: {loss.item().hex()}", flush=True)
print("statistics", [float(value).hex() for value in model[1].running_mean], flush=True)
"""


@pytest.mark.parametrize("again", ["the loop's cell", "both cells"])
def test_an_error_between_accumulated_batches_leaves_nothing_of_them(
    tmp_path: Path, again: str
) -> None:
    plain, hurt = tmp_path / "plain", tmp_path / "hurt"
    plain.mkdir()
    hurt.mkdir()
    expected = run(JOIN + epochs(2) + ACCUMULATE, folder=plain).text
    first = epochs(2, interrupted("accumulated", 7, "undefined")) + ACCUMULATE
    repeated = [JOIN_AGAIN] if again == "both cells" else []
    ended = run(JOIN, first, *repeated, epochs(2) + ACCUMULATE, folder=hurt)
    assert "cell 1: NameError\n" in ended.text, ended.text
    assert losses(ended.text) == losses(expected)
    (statistics,) = re.findall(r"^statistics .*$", expected, re.M)
    assert statistics in ended.text


def test_an_open_world_leaves_the_kernels_hooks_and_its_error_handling(tmp_path: Path) -> None:
    hooks = "import signal, sys\nhooks = sys.excepthook, sys.exit\n"
    same = "\nassert hooks == (sys.excepthook, sys.exit)"
    term = "\nassert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL"
    cells = (hooks + JOIN + same, epochs(1) + LOOP, "wrong", "sys.exit(3)", "world.close()" + term)
    ended = run(*cells, folder=tmp_path)
    ends = re.findall(r"^cell \d: (\w+)$", ended.text, re.M)
    assert ends == ["done", "done", "NameError", "SystemExit", "done"], ended.text
    assert ended.status == 0


def test_a_run_has_one_world(tmp_path: Path) -> None:
    notebook = Notebook(JOIN + epochs(1, interrupted("in step", 3)) + LOOP, folder=tmp_path)
    notebook.line_with("in step 3")
    in_step = JOIN + epochs(1, interrupted("in step", 3, "paceline.join()")) + LOOP
    second = run(JOIN, in_step.replace('"run"', '"other"'), folder=tmp_path)
    notebook.kill_all()
    notebook.wait()
    assert "run run: this run is active on this machine (process" in second.text
    assert "its world is still open: call join() once" in second.text
    assert re.findall(r"^cell \d: (\w+)$", second.text, re.M) == ["ConfigError"] * 2, second.text


def test_sigterm_saves_before_it_ends_the_kernel(
    whole: dict[int, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wait = "(print(where, world.steps, flush=True), threading.Event().wait(60))"
    notebook = Notebook(JOIN + epochs(3, interrupted("in step", 7, wait)) + LOOP, folder=tmp_path)
    notebook.line_with("in step 7")
    notebook.send(signal.SIGTERM)
    assert notebook.wait().status == -signal.SIGTERM
    ended = run(JOIN + epochs(3) + LOOP, folder=tmp_path)
    repeated = made(ended.text)
    assert 4 <= repeated[0] <= 7
    assert losses(ended.text).items() <= whole.items()
    assert_exact(tmp_path, capsys, 15)


def test_a_kernel_that_ends_saves_its_open_world(whole: dict[int, str], tmp_path: Path) -> None:
    run(JOIN + epochs(1) + LOOP, folder=tmp_path)
    ended = run(JOIN + epochs(3) + LOOP, folder=tmp_path)
    assert made(ended.text) == list(range(5, 15)), ended.text
    assert losses(ended.text).items() <= whole.items()


FUNCTION = """
import os, sys, threading
import torch
from torch import nn
import paceline

torch.nn.Linear(300, 300)(torch.ones(300, 300)).sum().backward()  # a fork would hang
SCALE = 10
parts = torch.arange(4)

class Answer:
    def __init__(self, value):
        self.value = value

def total(shift):
    world = paceline.join()
    mine = parts[2 * world.rank : 2 * world.rank + 2] * SCALE + shift
    return world.rank, world.world_size, world.total(mine.sum()).item(), Answer(os.getpid())
"""


def test_two_workers_call_a_function_of_a_cell(tmp_path: Path) -> None:
    check = """
(r0, s0, t0, a0), (r1, s1, t1, a1) = paceline.launch(total, 1, workers=2)
assert (r0, r1, s0, s1) == (0, 1, 2, 2)
assert t0 == t1 == 64
assert isinstance(a0, Answer) and len({a0.value, a1.value, os.getpid()}) == 3
(alone,) = paceline.launch(total, 0)
assert alone[:3] == (0, 1, 10)
"""
    unpicklable = "print(paceline.launch(lambda: (part for part in parts), workers=1))"
    apart = "print(paceline.launch(lambda: 7, workers=2))"
    ended = run(FUNCTION, check, unpicklable, apart, folder=tmp_path)
    assert "cell 1: done\n" in ended.text, ended.text
    assert "the function ended without paceline.join(): its 2 processes worked apart" in ended.text
    assert "[7, 7]\ncell 3: done" in ended.text
    assert "rank 0's result can't be sent to the caller (cannot pickle 'generator'" in ended.text
    assert "[None]\ncell 2: done" in ended.text


def test_a_workers_error_is_raised_once_with_its_rank_and_traceback(tmp_path: Path) -> None:
    fail = """
def fail(kind):
    world = paceline.join()
    if world.rank == 1:
        raise kind("too bad.")
    world.total(torch.ones(1))
def launched(*arguments):
    try:
        paceline.launch(*arguments, workers=2)
    except paceline.PacelineError as error:
        print(type(error).__name__, error)
"""
    cells = ("launched(fail, KeyError)", "launched(fail, paceline.ConfigError)")
    early = "launched(lambda: 1 / 0)"
    ended = run(FUNCTION, fail, *cells, early, folder=tmp_path)
    name = r"rank 1 on machine 0 \(.*\)"
    told = re.compile(rf"^PacelineError {name}: (Traceback.*?\n)cell 2: done", re.M | re.S)
    found = told.search(ended.text)
    assert found, ended.text
    assert re.search(r"^    raise kind\(.too bad..\)$", found[1], re.M), found[1]
    assert found[1].endswith("KeyError: 'too bad.'\n")
    assert "function_worker" not in found[1]
    assert re.search(rf"^ConfigError {name}: too bad\.$", ended.text, re.M)
    assert re.search(r"^ZeroDivisionError: division by zero$", ended.text, re.M)
    assert ended.text.count("Traceback") == 2, ended.text


def test_an_interrupt_ends_all_workers(tmp_path: Path) -> None:
    wait = """
def wait():
    world = paceline.join()
    world.total(torch.ones(1))
    print("waits", flush=True)
    threading.Event().wait(60)
"""
    launched = "paceline.launch(wait, workers=2)"
    alive = "print('alive', flush=True); threading.Event().wait(60)"
    notebook = Notebook(FUNCTION, wait, launched, alive, folder=tmp_path)
    for _ in range(2):
        notebook.line_with("waits")
    family = psutil.Process(notebook.pid).children(recursive=True)
    assert len(family) == 2
    notebook.send(signal.SIGINT)
    notebook.line_with("cell 2: KeyboardInterrupt")
    notebook.line_with("alive")
    assert all_end(family)
    assert not notebook.family()
    notebook.kill_all()
    notebook.wait()


def test_interrupted_workers_save_and_resume(tmp_path: Path) -> None:
    function = """
from tests.harness.library.small_training import *

def train(epochs):
    world = paceline.join("run")
    model = network()
    optimizer = sgd(model)
    paceline.parallelize(model, optimizer, world)
    loader = paceline.loader(samples(), BATCH, world)
    for _ in range(loader.epoch, epochs):
        for x, y in loader:
            with world.step():
                loss_of(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
            print("made", world.steps)
    return world.steps
"""
    forever, again = "paceline.launch(train, 10**6, workers=2)", "print(paceline.launch(train, 1))"
    notebook = Notebook(FUNCTION, function, forever, again, folder=tmp_path)
    notebook.line_with("made 7")
    notebook.send(signal.SIGINT)
    saved = notebook.line_with("the state after")
    assert "cell 2: KeyboardInterrupt" in notebook.line_with("cell 2")
    ended = notebook.wait().text
    steps = re.search(r"the state after (\d+) steps is saved in run", saved)
    assert steps, saved
    assert f"[{steps[1]}]\ncell 3: done" in ended, ended
    assert main(["ledger", str(tmp_path / "run")]) == 0


def test_workers_end_with_a_killed_kernel(tmp_path: Path) -> None:
    waits = "lambda: (print('waits', flush=True), threading.Event().wait(60))"
    wait = f"import threading\npaceline.launch({waits})"
    notebook = Notebook(FUNCTION, wait, folder=tmp_path, real=True)
    notebook.line_with("waits")
    family = notebook.family()
    notebook.send(signal.SIGKILL)
    notebook.wait()
    assert len(family) == 1
    assert all_end(family)


def test_workers_train_as_one_process(whole: dict[int, str], tmp_path: Path) -> None:
    """The world of the notebook has the folder; it is closed before the workers have it."""
    function = "def train_all(epochs_):\n" + "".join(
        f"    {line}\n" for line in (JOIN + LOOP.replace("EPOCHS", "epochs_")).splitlines()
    ).replace("    from tests.harness.library.small_training import *\n", "")
    function = function.replace("network(norm=True", "network(norm=False")
    imports = "from tests.harness.library.small_training import *\nat = lambda where: None\n"
    first = (JOIN + epochs(1) + LOOP).replace("network(norm=True", "network(norm=False")
    launched = imports + function + "paceline.launch(train_all, 3, workers=2)"
    ended = run(first, launched, folder=tmp_path)
    assert "cell 1: done\n" in ended.text, ended.text
    assert sorted(set(made(ended.text))) == list(range(15))
    assert main(["ledger", str(tmp_path / "run")]) == 0
