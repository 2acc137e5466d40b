"""The modules of the package, what they import of it, and the order in which they may."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.harness.processes.python_program import ROOT

PACKAGE = ROOT / "paceline"

# From the top, by packages or single modules; those on one line don't import each other.
LAYERS = (
    "cli",
    "api",
    "inference session",
    "wiring",
    "server",
    "trainer",
    "run",
    "snapshots",
    "replica",
    "parallel",
    "algorithms",
    "update",
    "reduce",
    "codecs",
    "data",
    "state",
    "observe",
    "generation",
    "timeline",
    "cluster/join",
    "cluster/supervision",
    "cluster/rendezvous",
    "cluster/environment cluster/membership",
    "cluster/membership/leases",
    "cluster/launchers cluster/stores",
    "cluster/jitter cluster/json_record cluster/print_message",
    "comm",
    "atomic_write config models recorder",
    "errors version",
)
DEPTH = {part: depth for depth, line in enumerate(LAYERS) for part in line.split()}


@dataclass(frozen=True)
class Module:
    """A file of the package.

    Attributes:
        path: its path.
        name: its path in the package, without the suffix: "comm/window".
    """

    path: Path
    name: str

    @cached_property
    def source(self) -> str:
        """The text."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.source)

    @property
    def part(self) -> str | None:
        """The part of `LAYERS` that the module belongs to."""
        return part_of(self.name)

    @cached_property
    def imports(self) -> set[str]:
        """The names of what it imports of the package, anywhere in it: modules, or their values."""
        return set(self._imports())

    def _imports(self) -> Iterator[str]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: import absolutely"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                package, _, inner = name.partition(".")
                if package == PACKAGE.name and inner:
                    yield inner.replace(".", "/")


def modules(package: Path = PACKAGE) -> list[Module]:
    """List the package's files."""
    files = sorted(package.rglob("*.py"))
    return [Module(file, str(file.relative_to(package).with_suffix(""))) for file in files]


def import_graph(all_modules: Sequence[Module]) -> dict[str, set[str]]:
    """Return which of these modules each of them imports, by their names."""
    names = {module.name for module in all_modules}
    graph = {}
    for module in all_modules:
        found = {name if name in names else name.rpartition("/")[0] for name in module.imports}
        graph[module.name] = (found & names) - {module.name}
    return graph


def part_of(name: str) -> str | None:
    """Return the part of `LAYERS` that has a name, the longest that fits; None: there is none."""
    while name and name not in DEPTH:
        name = name.rpartition("/")[0]
    return name or None


def imports_upward(module: Module) -> set[str]:
    """Return the parts that a module imports and that don't stand below its own."""
    imported = {part_of(name) for name in module.imports}
    own = module.part
    assert own is not None
    return {part for part in imported if part and part != own and DEPTH[part] <= DEPTH[own]}
