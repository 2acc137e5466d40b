"""The wheels for a GPU machine without a network: what Paceline needs besides torch and numba."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
THERE = {"torch", "numpy", "numba"}  # on such a machine, with all that they need
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}


def wheels() -> set[str]:
    """Return the names that `make gpu-wheels` collects."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    found = re.search(r"^GPU_WHEELS := (.*)$", makefile, re.MULTILINE)
    assert found is not None
    return set(found[1].split())


def needs(name: str) -> set[str]:
    """Return what a package needs on Python 3.12, as its own metadata say."""
    texts = metadata.requires(name) or []
    required = [Requirement(text) for text in texts]
    return {
        canonicalize_name(one.name)
        for one in required
        if one.marker is None or one.marker.evaluate(PYTHON)
    }


def test_the_wheels_are_what_paceline_needs_and_what_that_needs() -> None:
    needed = {"paceline"}
    rest = ["paceline"]
    while rest:
        more = needs(rest.pop()) - needed - THERE
        needed |= more
        rest += more
    assert {canonicalize_name(name) for name in wheels()} == needed - {"paceline"}


def test_each_wheel_has_a_version() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in constraints}
    assert wheels() <= pinned
