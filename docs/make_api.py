"""Write docs/reference/api*.md: the public names, from their docstrings.

    python docs/make_api.py

What a docstring says stays there; a page is made again, and never edited.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docstring_parser import DocstringStyle, parse

import paceline
from paceline.api.meter import Meter

FOLDER = Path(__file__).with_name("reference")
WIDTH = 100

HEAD = """\
# {title}

Made by `python docs/make_api.py` from the docstrings of `paceline`; don't edit it here.

"""
METHODS = ("World", "Meter", "OuterRule")  # classes whose methods a script calls or writes


def documents() -> dict[str, str]:
    """Make the text of each page."""
    return {name: _page(title, values) for name, (title, values) in pages().items()}


def pages() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the title and the public names of each page."""
    public = {name: getattr(paceline, name) for name in paceline.__all__}
    functions = {name: value for name, value in public.items() if not isinstance(value, type)}
    errors = {name: value for name, value in public.items() if _is_error(value)}
    world = {"World": paceline.World, "Meter": Meter, "Loader": paceline.Loader}
    rules = {name: public[name] for name in public if name not in {*functions, *errors, *world}}
    return {
        "api": ("The library: functions", functions),
        "api-world": ("The library: the world, its meters and loaders", world),
        "api-averages": ("The library: averages and errors", {**rules, **errors}),
    }


def members(name: str, value: type) -> list[str]:
    """Return what a class itself defines, and not what it overrides, and a script uses."""
    return [
        member
        for member, what in vars(value).items()
        if not member.startswith("_")
        and (isinstance(what, property) or (inspect.isfunction(what) and name in METHODS))
    ]


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _page(title: str, values: Mapping[str, Any]) -> str:
    parts = []
    for name, value in values.items():
        parts += _entry(f"## `{name}`", f"paceline.{name}", value)
        if isinstance(value, type):
            parts += _members(name, value)
    return HEAD.format(title=title) + "\n\n".join(part for part in parts if part) + "\n"


def _members(name: str, value: type) -> Iterator[str]:
    defined = {member: vars(value)[member] for member in members(name, value)}
    yield "\n".join(
        _wrapped(f"- **`{member}`**: {inspect.getdoc(what)}", "  ")
        for member, what in defined.items()
        if isinstance(what, property)
    )
    for member, what in defined.items():
        if inspect.isfunction(what):
            yield from _entry(f"### `{name}.{member}`", f"{name.lower()}.{member}", what)


def _entry(heading: str, call: str, value: Any) -> Iterator[str]:
    text = parse(inspect.getdoc(value) or "", DocstringStyle.GOOGLE)
    yield heading
    if inspect.isfunction(value):
        yield f"```text\n{_signature(call, value)}\n```"
    yield _prose(text.description or "")
    yield "\n".join(
        _wrapped(f"- **`{argument.arg_name}`**: {argument.description}", "  ")
        for argument in text.params
    )
    for result in text.many_returns:
        yield _wrapped(f"{'Yields' if result.is_generator else 'Returns'} {result.description}")
    yield "\n".join(
        _wrapped(f"- raises `{error.type_name}`: {error.description}", "  ")
        for error in text.raises
    )


def _signature(call: str, function: Any) -> str:
    """Write a call with its defaults, without types and `self`."""
    words = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in "".join(words):
            words.append("*")
        words.append(str(parameter.replace(annotation=parameter.empty)))
    return textwrap.fill(f"{call}({', '.join(words)})", WIDTH, subsequent_indent="    ")


def _prose(text: str) -> str:
    """Wrap paragraphs; leave indented ones, which are equations or code, as a block."""
    blocks = []
    for paragraph in re.split(r"\n\n+", text.replace("::\n", ":\n")):
        if paragraph.startswith("    "):
            blocks.append(f"```text\n{textwrap.dedent(paragraph)}\n```")
        else:
            blocks.append(_wrapped(paragraph))
    return "\n\n".join(blocks)


def _wrapped(text: str, indent: str = "") -> str:
    words = " ".join(text.split())
    return textwrap.fill(
        words, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


if __name__ == "__main__":
    for name, text in documents().items():
        (FOLDER / f"{name}.md").write_text(text)
