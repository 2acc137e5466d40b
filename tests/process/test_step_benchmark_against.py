"""Another checkout's rows run in turn with this one's, each by its own code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.documents.benchmark_runs import BENCHMARKS, LIMIT, RATIO, benchmark, load, table

SMALL = ("--model", "resnet20", "--image-size", "8", "--batch", "2", "--links", "loopback")
MARK = "a module of the other checkout"

# What `benchmarks/checkout.py` needs of a checkout, as today's have it; a rank is a `sleep`.
STUB = {
    "paceline/__init__.py": "",
    "benchmarks/variants.py": "MAKERS = {'none': None, 'notified': None}",
    "benchmarks/links.py": """
from dataclasses import dataclass

@dataclass(kw_only=True)
class Machine:
    address: str
    interface: str
    enter: tuple
""",
    "benchmarks/ranks.py": """
import json, subprocess
from contextlib import contextmanager
from pathlib import Path

class Ranks:
    def __init__(self, told):
        self.told = told

    def turn(self, row, steps):
        Path("told.json").write_text(json.dumps([self.told, row, steps]))
        return 12.5

@contextmanager
def start(machines, program, work, ranks):
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(ranks)]
    try:
        yield Ranks([machines[1].address, machines[1].enter, program.name, work, ranks])
    finally:
        for process in processes:
            process.kill()
            process.wait()
""",
}


@dataclass
class Scripted:
    """A side whose rows take what a script says, a value a round; tells a log what it does."""

    name: str
    log: list[str]
    milliseconds: dict[str, Sequence[float]]

    @contextmanager
    def start(self, rows: Sequence[str]) -> Iterator[Scripted]:
        self.log.append(f"{self.name} starts {' '.join(rows)}")
        yield self
        self.log.append(f"{self.name} ends")

    def turn(self, row: str, steps: int) -> float:
        self.log.append(f"{self.name} {row} {steps}")
        first, *self.milliseconds[row] = self.milliseconds[row]
        return first


def test_rows_run_on_both_sides_in_turn_and_a_quiet_one_is_done_before_a_noisy_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    against = load("against")
    log: list[str] = []
    new = Scripted("new", log, {"quiet": [103] * 4, "noisy": [103, 153, 103, 153]})
    old = Scripted("old", log, {"quiet": [100] * 4, "noisy": [100] * 4})
    until = against.Until(half_width=0.01, fewest=2, most=4, fresh=3)
    found = against.compare(["quiet", "noisy"], {"new": new.start, "old": old.start}, 5, until)
    assert found["quiet"] == {"new": [103, 103], "old": [100, 100]}
    assert found["noisy"] == {"new": [103, 153, 103, 153], "old": [100] * 4}
    assert log == [
        "new starts quiet noisy",
        "old starts quiet noisy",
        *("new quiet 5", "old quiet 5", "new noisy 5", "old noisy 5"),
        *("old quiet 5", "new quiet 5", "old noisy 5", "new noisy 5"),
        *("new noisy 5", "old noisy 5"),
        "old ends",
        "new ends",
        "old starts noisy",
        "new starts noisy",
        *("old noisy 5", "new noisy 5"),
        "new ends",
        "old ends",
    ]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2  # one a restart
    assert all("quiet 1.030 (1.030 to 1.030) after 2 rounds" in line for line in told)
    assert told[1].endswith("noisy 1.280 (1.030 to 1.530) after 4 rounds")


def test_the_table_has_new_milliseconds_over_old(capsys: pytest.CaptureFixture[str]) -> None:
    against = load("against")
    results = {"notified": {"new": [102.0, 104.0, 103.0], "old": [100.0, 100.0, 100.0]}}
    against.print_ratios(results, markdown=True)
    found = table(capsys.readouterr().out)
    assert found == {"notified": ["103.0", "100.0", "1.030 (1.020 to 1.040)", "1.0%", "3"]}


@contextmanager
def stub(folder: Path) -> Iterator[tuple[Any, Callable[[], AbstractContextManager[Any]]]]:
    """Run the program of a checkout that has nothing but its names; give what starts ranks."""
    for name, text in STUB.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    link = load("links").Machine(address="10.77.0.1", interface="eth0", enter=("nsenter",))
    with load("against").run_checkout(folder) as checkout:
        yield checkout, lambda: checkout.start([link, link], {"rows": ["notified"]}, 2)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_ranks_of_another_checkout_do_what_they_are_told_and_end(tmp_path: Path) -> None:
    before = children()
    with stub(tmp_path) as (checkout, start):
        assert checkout.methods == ["none", "notified"]
        assert checkout.models == []
        for _ in range(2):
            with start() as ranks:
                assert ranks.turn("notified", 5) == 12.5
                assert len(children()) == len(before) + 3
            assert len(children()) == len(before) + 1
    work = {"rows": ["notified"]}
    told = json.loads((tmp_path / "told.json").read_text())
    assert told == [["10.77.0.1", ["nsenter"], "variants.py", work, 2], "notified", 5]
    assert children() == before


def test_ctrl_c_between_turns_of_another_checkout_leaves_no_process(tmp_path: Path) -> None:
    before = children()

    def interrupted() -> None:
        with stub(tmp_path) as (_, start), start():
            assert len(children()) == len(before) + 3
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert children() == before


def test_another_checkout_whose_ranks_fail_is_named(tmp_path: Path) -> None:
    def failing() -> None:
        with stub(tmp_path) as (_, start), start() as ranks:
            (tmp_path / "told.json").mkdir()
            ranks.turn("notified", 5)

    before = children()
    with pytest.raises(SystemExit, match=f"{tmp_path}: its benchmark ended"):
        failing()
    assert children() == before


def test_a_model_that_another_checkout_lacks_is_refused(tmp_path: Path) -> None:
    with stub(tmp_path):  # writes its files
        pass
    with benchmark("step.py", "--model", "gpt", "--against", str(tmp_path)) as process:
        _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 2
    assert f"--model gpt: {tmp_path} doesn't have it" in err


def test_a_checkout_runs_in_turn_with_a_copy_of_itself(tmp_path: Path) -> None:
    for part in ("paceline", "benchmarks"):
        shutil.copytree(BENCHMARKS.parent / part, tmp_path / part)
    with (tmp_path / "paceline/__init__.py").open("a") as package:
        print(f"import sys; print({MARK!r}, file=sys.stderr)", file=package)
    with (tmp_path / "benchmarks/variants.py").open("a") as variants:
        print("del MAKERS['notified-int8']", file=variants)
    rows = ("--rows", "allreduce", "notified-int8", "ddp:1", "--rounds", "2", "--most-rounds", "2")
    arguments = ("--against", str(tmp_path), *rows, "--steps", "1", "--markdown")
    with benchmark("step.py", *SMALL, *arguments) as process:
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert err.count(MARK) == 3  # its two ranks and the program that starts them
    assert f"notified-int8: not compared, as {tmp_path} doesn't have it." in out
    cells = table(out)
    assert list(cells) == ["allreduce"]
    new, old, ratio, _, rounds = cells["allreduce"]
    assert float(new) > 0
    assert float(old) > 0
    assert RATIO.fullmatch(ratio)
    assert rounds == "2"
