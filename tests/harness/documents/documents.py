"""What the documents ask a reader to run: fenced blocks, and the marks above them.

A block's language says what becomes of it:

    sh        a script; it ends with status 0
    console   commands after "$ ", each followed by what it says; "…" stands for anything
    python    a program, or a file that a later command needs
    text      nothing to run

HTML comments directly above a block, which readers don't see, tell the test more:

    <!-- shown only: REASON -->              not run; the tests have a short list of reasons
    <!-- two machines: run together -->      each command is another machine's, all at once
    <!-- test adds: FLAGS -->                appended to each training command, to make it short
    <!-- status: 2 -->                       what the commands' status is instead of 0
    <!-- tried twice: REASON -->             once more if it failed
    <!-- interrupted after: WORDS -->        Ctrl-C is pressed when it has said them
    <!-- file: NAME -->                      the block is a file of that name
    <!-- in a fresh folder -->               the section needs no database made before
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LANGUAGES = ("sh", "console", "python", "text")
TRAIN = ("paceline train", "resnet50_trainer")

_MARK = re.compile(r"<!-- ([a-z ]+?)(?:: (.*))? -->")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block.

    Attributes:
        section: the heading above it, of the first or second level.
        line: where it is in its document.
        marks: the comments above it, by their first words.
    """

    section: str
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        return self.language != "text" and "shown only" not in self.marks

    @property
    def status(self) -> int:
        return int(self.marks.get("status", 0))

    @property
    def commands(self) -> list[str]:
        """The lines of a script, without comments, continued lines joined."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]

    @property
    def dialogue(self) -> list[tuple[str, str]]:
        """The commands of a console, each with what it says."""
        parts = re.sub(r"\\\n\s*", "", self.text).split("$ ")
        pairs = [part.partition("\n") for part in parts if part.strip()]
        return [(command, answer) for command, _, answer in pairs]


def blocks(document: Path) -> list[Block]:
    """Read a document's fenced blocks in their order."""
    return list(_blocks(document.read_text().splitlines()))


def links(document: Path) -> list[str]:
    """List the relative links of a document, of pictures too."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def headings(document: Path) -> set[str]:
    """Name a document's headings as links do: `#what-is-there`."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def _blocks(lines: list[str]) -> Iterator[Block]:
    section, at = "", 0
    marks: dict[str, str] = {}
    while at < len(lines):
        line = lines[at]
        if line.startswith("```"):
            end = lines.index("```", at + 1)
            text = "".join(f"{inner}\n" for inner in lines[at + 1 : end])
            yield Block(
                section=section, line=at + 1, language=line[3:] or "text", text=text, marks=marks
            )
            marks, at = {}, end
        elif mark := _MARK.fullmatch(line):
            marks[mark[1]] = mark[2] or ""
        elif line.strip():
            marks = {}
            heading = re.match(r"##? (.*)", line)
            section = heading[1] if heading else section
        at += 1
