"""The walks of docs/inside/house.md: each function that they name is in the file that they name."""

from __future__ import annotations

import ast
import re

import pytest

from tests.harness.layers import PACKAGE

PAGE = PACKAGE.parent / "docs/inside/house.md"
ROW = re.compile(r"\| `([\w/]+\.py)` \| (?:⇒ )?(`[\w`, ]+`) \| ", re.MULTILINE)
STEPS = [(file, names) for file, names in ROW.findall(PAGE.read_text())]


def test_every_row_of_the_walks_is_read() -> None:
    rows = re.findall(r"^\| `", PAGE.read_text(), re.MULTILINE)
    assert len(STEPS) == len(rows) > 100


@pytest.mark.parametrize("file", sorted({file for file, _ in STEPS}))
def test_the_functions_of_a_walk_are_in_their_file(file: str) -> None:
    kinds = (ast.FunctionDef, ast.ClassDef)
    tree = ast.parse((PACKAGE / file).read_text())
    defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    named = {name for where, names in STEPS if where == file for name in re.findall(r"\w+", names)}
    assert named - defined == set()
