"""The rooms of docs/inside/house.md: imports point downward only."""

from __future__ import annotations

import ast

import pytest

from tests.harness.layers import Module, imports_upward, modules

MODULES = modules()
ENVIRONMENT_READER = "cluster/environment"
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}


def reads_environment(module: Module) -> bool:
    """Return whether a file names `os.environ` or `os.getenv`, or imports either."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT:
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            return any(alias.name in ENVIRONMENT for alias in node.names)
    return False


def test_every_module_belongs_to_a_layer() -> None:
    outside = {module.name for module in MODULES if module.part is None}
    assert outside == {"__init__", "cluster/__init__"}  # the former shows what `api` has


@pytest.mark.parametrize(
    "module", [module for module in MODULES if module.part], ids=lambda module: module.name
)
def test_imports_point_downward(module: Module) -> None:
    upward = imports_upward(module)
    assert not upward, f"{module.path} must not import {', '.join(sorted(upward))}"


def test_only_one_module_below_the_commands_reads_the_environment() -> None:
    readers = {one.name for one in MODULES if one.part != "cli" and reads_environment(one)}
    assert readers <= {ENVIRONMENT_READER}
