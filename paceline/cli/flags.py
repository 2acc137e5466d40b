"""From an argument list to a configuration, by tyro; old habits of Caffe2's users included.

Flags are accepted with `_` and `-`. `--use_cpu`, `--use_cpu True` and `--use_cpu=0` are all
understood: Caffe2's switches took a value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TypeVar, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

Config = TypeVar("Config")

_YES = frozenset({"true", "1", "yes"})
_NO = frozenset({"false", "0", "no"})


def parse(config: type[Config], argv: Sequence[str], *, prog: str, description: str) -> Config:
    """Read the arguments, or print help or what is wrong and exit (0 or 2).

    Raises:
        SystemExit: help was asked for, or the arguments are wrong.
    """
    parsed: Config = tyro.cli(
        config,
        args=list(_plain_switches(argv, frozenset(switches(config)))),
        prog=prog,
        description=description,
        use_underscores=True,
        registry=_numbers(),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    return parsed


def switches(config: type) -> Iterator[tuple[str, bool]]:
    """Yield the name and default of each boolean flag, those of nested configurations too."""
    hints = get_type_hints(config)
    for field in fields(config):
        kind = hints[field.name]
        if kind is bool:
            yield field.name, bool(field.default)
        elif isinstance(kind, type) and is_dataclass(kind):
            yield from switches(kind)


def takes(config: type, flag: str, word: str) -> bool:
    """Tell whether the word behind a flag is its value; a switch takes yes and no only."""
    if "=" in flag or flag in ("-h", "--help"):
        return False
    name, _ = _switch(flag, dict(switches(config)))
    return not name or word.lower() in _YES | _NO


def _numbers() -> ConstructorRegistry:
    """Make tyro's rules for numbers, which say what is wrong in people's words, not Python's."""
    registry = ConstructorRegistry()
    for kind, metavar, rule in (
        (int, "INT", "a whole number, such as 32"),
        (float, "FLOAT", "a number, such as 0.1"),
    ):
        registry.primitive_rule(partial(_number, kind, metavar, rule))
    return registry


def _number(
    kind: type[int] | type[float], metavar: str, rule: str, info: PrimitiveTypeInfo
) -> PrimitiveConstructorSpec[float] | None:
    def read(words: list[str]) -> float:
        try:
            return kind(words[0])
        except ValueError:
            raise ValueError(f"{words[0]!r} must be {rule}.") from None

    if info.type is not kind:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int | kind) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def _plain_switches(argv: Sequence[str], known: frozenset[tuple[str, bool]]) -> Iterator[str]:
    """Rewrite switches with a value into their presence or absence."""
    defaults = dict(known)
    words = deque(argv)
    while words:
        word = words.popleft()
        flag, equals, value = word.partition("=")
        name, on = _switch(flag, defaults)
        value = value if equals else (words[0] if words else "")
        if not name or value.lower() not in _YES | _NO:
            yield word
            continue
        if not equals:
            words.popleft()
        wanted = on if value.lower() in _YES else not on
        if wanted is not defaults[name]:
            yield f"--{name}" if wanted else f"--no_{name}"


def _switch(flag: str, defaults: Mapping[str, bool]) -> tuple[str, bool]:
    """Return the switch that a word names, or "", and whether the word turns it on."""
    name = flag.removeprefix("--").replace("-", "_")
    if not flag.startswith("--"):
        return "", False
    if name in defaults:
        return name, True
    off = name.removeprefix("no_")
    return (off, False) if name != off and off in defaults else ("", False)
