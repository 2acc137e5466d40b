"""The mutation check breaks what it says, and one place at a time."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.harness.call_map import CallMap
from tests.harness.mutation_check import OPERATORS, break_at, draw, places

SOURCE = '''
def f(a: int = 3) -> bool:
    """Not 7."""
    assert a == 9
    self.x = 1 + a
    g(a)
    if a < 2 and all(b):
        return True
    raise ValueError("no" * 4)
'''


def test_each_place_is_broken_once_by_each_operator() -> None:
    found = list(places(ast.parse(SOURCE)))
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    changes: dict[str, list[tuple[str, str]]] = {}
    for number, (_, operator) in enumerate(found):
        broken = break_at(SOURCE, number).splitlines()
        ((before, after),) = [(a, b) for a, b in zip(plain, broken, strict=True) if a != b]
        changes.setdefault(operator, []).append((before.strip(), after.strip()))
    assert changes == {
        "statement": [("self.x = 1 + a", "pass"), ("g(a)", "pass")],
        "arithmetic": [("self.x = 1 + a", "self.x = 1 - a")],
        "number": [
            ("self.x = 1 + a", "self.x = 2 + a"),
            ("if a < 2 and all(b):", "if a < 3 and all(b):"),
        ],
        "condition": [("if a < 2 and all(b):", "if not (a < 2 and all(b)):")],
        "boolean": [("if a < 2 and all(b):", "if a < 2 or all(b):")],
        "comparison": [("if a < 2 and all(b):", "if a <= 2 and all(b):")],
        "bound": [("if a < 2 and all(b):", "if a < 2 and any(b):")],
        "switch": [("return True", "return False")],
    }
    assert changes.keys() == OPERATORS.keys()


def test_a_seed_draws_the_same_breaks() -> None:
    root = Path(__file__).parents[2]
    one, again, other = draw(root, 12, 30), draw(root, 12, 30), draw(root, 13, 30)
    assert one == again
    assert one != other
    assert len(set(one)) == 30


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_break_of_the_product_is_still_a_program(operator: str) -> None:
    root = Path(__file__).parents[2]
    breaks = [one for one in draw(root, 1, 300) if one.operator == operator][:3]
    assert breaks
    for one in breaks:
        compile(break_at((root / one.path).read_text(), one.number), str(one.path), "exec")


CALLS = """
X = 1


@decorated
def outer(a):
    def inner():
        return 1
    return inner


def other(a=2): return a
"""


def test_the_tests_that_call_a_broken_function_come_first_the_fastest_first(tmp_path: Path) -> None:
    root, path = tmp_path / "copy", Path("paceline/run/x.py")
    (root / path).parent.mkdir(parents=True)
    (root / path).write_text(CALLS)
    outer, inner, other = [str(path), 5], [str(path), 7], [str(path), 12]
    calls = {
        "slow": (9.0, [outer, inner]),
        "fast": (1.0, [outer]),
        "middle": (2.0, [other]),
        "elsewhere": (1.0, [["paceline/run/y.py", 5]]),
    }
    folder = tmp_path / "map"
    folder.mkdir()
    for name, one in calls.items():  # as processes write them
        (folder / f"{name}.json").write_text(json.dumps({name: one}))
    call_map = CallMap(folder)

    def callers(line: int, budget: float = 50) -> list[str]:
        return call_map.callers(root, path, line, budget)

    assert callers(9) == ["fast", "slow"]
    assert callers(8) == ["slow"]
    assert callers(12) == ["middle"]
    assert callers(2) == ["fast", "middle", "slow"], "a module's constant matters to all"
    assert callers(9, budget=40) == ["fast"], "one test takes no more than a fifth"
    assert callers(2, budget=10.5) == ["fast", "middle"]
