"""Ranks that train the same samples, or means of unequal numbers, are told so; others aren't."""

from __future__ import annotations

import re
from pathlib import Path

from tests.harness.library.undivided_loops import RIGHT, WRONG, ignoring, parts
from tests.harness.processes.launcher_commands import run

SENTENCES = {
    ignoring: "the loss was a mean over",
    parts: "has other samples on rank 1 than on rank 0",
}


def test_what_the_first_steps_show_is_said_once(tmp_path: Path) -> None:
    ended = run("paceline", "-m", "tests.harness.library.undivided_loops", folder=tmp_path, ranks=2)
    assert ended.status == 0, ended.text
    name = ""
    found: dict[str, list[str]] = {make.__name__: [] for make in (*WRONG, *RIGHT)}
    for line in ended.text.splitlines():
        if (begun := re.match(r"begins (\w+)", line)) is not None:
            name = begun[1]
        elif line.startswith("paceline: ") and name:
            found[name].append(line)
    for make in WRONG:
        (said,) = found[make.__name__]
        sentence = SENTENCES.get(make, "train the same samples")
        assert sentence in said
    assert not any(found[make.__name__] for make in RIGHT)
