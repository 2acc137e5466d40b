"""Mutation check: breaks the product in many small ways, and counts which breaks the tests notice.

    python -m tests.harness.mutation_check --copy ../mutated --seed 12 --count 80

Each break is one operator applied at one place of `PACKAGES`, drawn at random with a fixed seed. It
is written into a copy of the repository, whose tests run until the first failure. A break that no
test notices is a survivor: a missing test, or equivalent to the original.

With `--map`, the tests that call the broken function run first, the fastest first, and all tests
only if these pass. The map is made once in the copy:

    CALL_MAP=../map .venv/bin/pytest -p tests.harness.call_map tests/unit tests/contract
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.harness.broken_copy import adopt_orphans, noticed_by
from tests.harness.call_map import CallMap

PACKAGES = ("run", "reduce", "algorithms", "update", "state")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
BOUNDS = {"min": "max", "max": "min", "all": "any", "any": "all"}
OPERATORS = {
    "comparison": "another comparison: < <= | > >= | == != | is, is not | in, not in",
    "boolean": "and | or",
    "condition": "an `if` or `while` whose condition is negated",
    "arithmetic": "another operation: + - | * + | // * | / * | % //",
    "number": "an integer that is one larger",
    "switch": "True | False",
    "bound": "min | max, all | any",
    "statement": "a call, or an assignment to an attribute or an item, that is left out",
}


@dataclass(frozen=True, kw_only=True)
class Break:
    """Break: one operator at one place.

    Attributes:
        path: the file, relative to the repository.
        number: the place's number among those of the file, in the order of `places`.
        line: its line.
        operator: a key of `OPERATORS`.
    """

    path: Path
    number: int
    line: int
    operator: str


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield each place of a file that can be broken, with its operator.

    Assertions, annotations, texts of errors, and attributes and constants with an annotation are
    left out.
    """
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom | ast.AnnAssign):
            continue
        yield from ((node, operator) for operator in _operators(node))
        for name, value in reversed(list(ast.iter_fields(node))):
            if name in ("annotation", "returns", "decorator_list", "bases", "defaults"):
                continue
            children = value if isinstance(value, list) else [value]
            waiting.extend(child for child in reversed(children) if isinstance(child, ast.AST))


def _operators(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[operation]) if type(operation) in COMPARISONS:
            yield "comparison"
        case ast.BoolOp():
            yield "boolean"
        case ast.If() | ast.While():
            yield "condition"
        case ast.BinOp(op=operation) | ast.AugAssign(op=operation) if type(operation) in ARITHMETIC:
            yield "arithmetic"
        case ast.Constant(value=bool()):
            yield "switch"
        case ast.Constant(value=int()):
            yield "number"
        case ast.Call(func=ast.Name(id=name)) if name in BOUNDS:
            yield "bound"
        case ast.Expr(value=ast.Call()):
            yield "statement"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement"


def break_at(source: str, number: int) -> str:
    """Return a file's source with the place of a number broken; its comments are lost."""
    tree: ast.AST = ast.parse(source)
    node, operator = list(places(tree))[number]
    match node, operator:
        case ast.Compare(), "comparison":
            node.ops = [COMPARISONS[type(node.ops[0])]()]
        case ast.BoolOp(), _:
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ((ast.If() | ast.While()), _):
            node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
        case ((ast.BinOp() | ast.AugAssign()), _):
            node.op = ARITHMETIC[type(node.op)]()
        case ast.Constant(), "switch":
            node.value = not node.value
        case ast.Constant(), _:
            assert isinstance(node.value, int)
            node.value += 1
        case ast.Call(func=ast.Name()), _:
            assert isinstance(node.func, ast.Name)
            node.func.id = BOUNDS[node.func.id]
        case _:
            tree = _Without(node).visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


class _Without(ast.NodeTransformer):
    """Replaces one statement by `pass`."""

    def __init__(self, statement: ast.AST) -> None:
        self._statement = statement

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.Pass() if node is self._statement else self.generic_visit(node)


def draw(root: Path, seed: int, count: int) -> list[Break]:
    """Draw breaks from all places of `PACKAGES`, in the order in which they are tried."""
    found = [
        Break(
            path=path.relative_to(root),
            number=number,
            line=getattr(node, "lineno", 0),
            operator=operator,
        )
        for package in PACKAGES
        for path in sorted((root / "paceline" / package).rglob("*.py"))
        for number, (node, operator) in enumerate(places(ast.parse(path.read_text())))
    ]
    return random.Random(seed).sample(found, count)


def main() -> None:
    """Try the breaks, a line each, and print the survivors."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--copy", type=Path, required=True, help="a copy of the repository")
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of those to try")
    parser.add_argument("--tests", nargs="+", default=["tests/unit", "tests/contract"])
    parser.add_argument("--map", type=Path, help="files of tests.harness.call_map for this copy")
    parser.add_argument("--budget", type=float, default=60, help="seconds of the tests run first")
    parser.add_argument("--callers_only", action="store_true", help="run no more than those")
    parser.add_argument("--limit", type=float, default=1800, help="seconds; a hang is noticed")
    options = parser.parse_args()
    root, survivors = options.copy.resolve(), []
    call_map = CallMap(options.map) if options.map else None
    drawn = draw(root, options.seed, options.count)
    tried = options.only or range(len(drawn))
    adopt_orphans()
    for number in tried:
        one = drawn[number]
        rounds = [] if options.callers_only else [options.tests]
        if call_map and (callers := call_map.callers(root, one.path, one.line, options.budget)):
            rounds.insert(0, callers)
        path, started = root / one.path, time.monotonic()
        source, status = path.read_text(), path.stat()
        try:
            path.write_text(break_at(source, one.number))
            results = (noticed_by(root, tests, options.limit) for tests in rounds)
            what = next(filter(None, results), "SURVIVES")
        finally:
            path.write_text(source)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as its compiled file says
        where = f"{one.path}:{one.line}"
        seconds = time.monotonic() - started
        print(f"{number:3} {seconds:5.0f} s  {one.operator:10} {where:55} {what}", flush=True)
        if what == "SURVIVES":
            survivors.append(where)
    print(f"{len(tried) - len(survivors)} of {len(tried)} noticed")


if __name__ == "__main__":
    main()
