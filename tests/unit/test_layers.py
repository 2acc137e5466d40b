"""The rooms of docs/architecture.md: imports point downward only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "paceline"
MODULES = sorted(PACKAGE.rglob("*.py"))

# From the top; packages on one line don't import each other.
LAYERS = (
    "cli",
    "api",
    "wiring",
    "trainer",
    "run",
    "replica",
    "algorithms",
    "update",
    "reduce",
    "codecs",
    "data",
    "state",
    "observe",
    "cluster",
    "comm",
    "atomic_write config models recorder",
    "errors version",
)
DEPTH = {part: depth for depth, line in enumerate(LAYERS) for part in line.split()}

ENVIRONMENT_READER = PACKAGE / "cluster" / "environment.py"
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}


def part_of(path: Path) -> str:
    """Name the package, or the module directly in `paceline`, that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_parts(path: Path) -> Iterator[str]:
    """Name the parts of `paceline` that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: import absolutely"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (n.split(".")[1] for n in names if n.startswith("paceline."))


def reads_environment(path: Path) -> bool:
    """Return whether a file names `os.environ` or `os.getenv`, or imports either."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT:
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            return any(alias.name in ENVIRONMENT for alias in node.names)
    return False


def in_layers() -> list[Path]:
    """List the modules below `paceline/__init__.py`, which shows what `api` has."""
    return [path for path in MODULES if path != PACKAGE / "__init__.py"]


def test_every_module_belongs_to_a_layer() -> None:
    assert {part_of(path) for path in in_layers()} <= set(DEPTH)


@pytest.mark.parametrize("path", in_layers(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    own = part_of(path)
    upward = {part for part in imported_parts(path) if part != own and DEPTH[part] <= DEPTH[own]}
    assert not upward, f"{path.relative_to(ROOT)} must not import {', '.join(upward)}"


def test_only_one_module_below_the_commands_reads_the_environment() -> None:
    readers = {path for path in MODULES if part_of(path) != "cli" and reads_environment(path)}
    assert readers <= {ENVIRONMENT_READER}
