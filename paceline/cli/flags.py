"""From an argument list to a configuration, by tyro; old habits of Caffe2's users included.

Flags are accepted with `_` and `-`. `--use_cpu`, `--use_cpu True` and `--use_cpu=0` are all
understood: Caffe2's switches took a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

import tyro

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


def _plain_switches(argv: Sequence[str], known: frozenset[tuple[str, bool]]) -> Iterator[str]:
    """Rewrite switches with a value into their presence or absence."""
    defaults: dict[str, Any] = dict(known)
    words = iter([*argv, ""])
    word = next(words)
    for following in words:
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        value = value if equals else following
        if flag.startswith("--") and name in defaults and value.lower() in _YES | _NO:
            wanted = value.lower() in _YES
            if wanted is not defaults[name]:
                yield f"--{name}" if wanted else f"--no_{name}"
            following = following if equals else next(words, "")
        elif word:
            yield word
        word = following
