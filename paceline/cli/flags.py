"""Parser of command lines: makes a configuration dataclass from an argument list, with tyro.

Flags are accepted with `_` and `-`. A switch may have a value, as in Caffe2: `--use_cpu`,
`--use_cpu True` and `--use_cpu=0`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from paceline.errors import ConfigError, Message

Config = TypeVar("Config")

_YES = frozenset({"true", "1", "yes"})
_NO = frozenset({"false", "0", "no"})
FOREIGN = {
    "lr": "base_learning_rate",
    "epochs": "num_epochs",
    "nproc_per_node": "num_workers",
    "nnodes": "num_shards",
    "node_rank": "shard_id",
}
"""Flags of other programs, with ours."""


def parse(config: type[Config], argv: Sequence[str], *, prog: str, description: str) -> Config:
    """Read the arguments, or print help or the mistake and exit (0 or 2).

    Raises:
        ConfigError: a flag has another name here, or a value breaks a rule.
        SystemExit: help was requested, or a flag is unknown or has no such value.
    """
    names = {name for name, _, _ in options(config)}
    for word in argv:
        name = flag_of(word)
        ours = FOREIGN.get(name, "")
        if name not in names and ours in names:
            remedy = Message(f"use {{--{ours}}}")
            raise ConfigError(flag=name, rule="there is no such option", remedy=remedy)
    registry = ConstructorRegistry()
    active: list[type] = []  # the dataclass that tyro's own rule describes
    registry.struct_rule(partial(_described, active))
    for kind, metavar, rule in (
        (int, "INT", "a whole number, such as 32"),
        (float, "FLOAT", "a number, such as 0.1"),
    ):
        registry.primitive_rule(partial(_number, kind, metavar, rule))
    try:
        parsed: Config = tyro.cli(
            config,
            args=list(_plain_switches(argv, switches(config))),
            prog=prog,
            description=description,
            use_underscores=True,
            registry=registry,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
        )
    except _Mistake as mistake:
        raise mistake.error from mistake
    return parsed


class _Mistake(Exception):
    """Carries a ConfigError past tyro, which would put it into a box, named by a dataclass."""

    def __init__(self, error: ConfigError) -> None:
        self.error = error


def switches(config: type) -> dict[str, bool]:
    """Return the default of each boolean flag by its name."""
    return {name: value for name, value, _ in options(config) if isinstance(value, bool)}


def flag_of(word: str) -> str:
    """Return the name of the flag that a word of a command line begins with; "": it is none."""
    flag = word.partition("=")[0]
    return flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""


def takes(config: type, flag: str, word: str) -> bool:
    """Return whether the word after a flag is its value; a switch takes only yes and no."""
    if "=" in flag or flag in ("-h", "--help"):
        return False
    name, _ = _switch(flag, switches(config))
    return not name or word.lower() in _YES | _NO


def options(config: type) -> tuple[tuple[str, Any, Any], ...]:
    """Return the name, default and type of each flag, those of nested configurations too.

    A flag with a second name is there twice.
    """
    return _options(config)


@cache
def _options(config: type) -> tuple[tuple[str, Any, Any], ...]:
    hints = get_type_hints(config)
    noted = get_type_hints(config, include_extras=True)
    found: list[tuple[str, Any, Any]] = []
    for field in fields(config):
        kind = hints[field.name]
        if isinstance(kind, type) and is_dataclass(kind):
            found += _options(kind)
        else:
            names = (field.name, *map(flag_of, aliases(noted[field.name])))
            found += ((name, field.default, kind) for name in names)
    return tuple(found)


def aliases(noted: Any) -> list[str]:
    """Return a flag's other names, `--name`, which are noted on its type."""
    notes = getattr(noted, "__metadata__", ())
    return [name for note in notes for name in getattr(note, "aliases", None) or ()]


def _number(
    kind: type[int] | type[float], metavar: str, rule: str, info: PrimitiveTypeInfo
) -> PrimitiveConstructorSpec[float | None] | None:
    """Return tyro's rule for numbers of a kind, whose errors are in plain words."""
    optional = info.type == kind | None

    def read(words: list[str]) -> float | None:
        if optional and words[0] == "None":
            return None
        try:
            return kind(words[0])
        except ValueError:
            raise ValueError(f"{words[0]!r} must be {rule}.") from None

    if info.type is not kind and not optional:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{None}}|{metavar}" if optional else metavar,
        instance_from_str=read,
        is_instance=lambda value: (
            (isinstance(value, int | kind) and not isinstance(value, bool))
            or (optional and value is None)
        ),
        str_from_instance=lambda value: [str(value)],
    )


def _described(active: list[type], info: StructTypeInfo) -> StructConstructorSpec | None:
    """Describe a dataclass as tyro does, with the help of each field as one paragraph."""
    if info.type in active or not is_dataclass(info.type):
        return None
    active.append(info.type)
    spec = ConstructorRegistry.get_struct_spec(info)
    active.pop()
    if not isinstance(spec, StructConstructorSpec):
        return None

    def instantiate(*args: Any, **values: Any) -> Any:
        try:
            return spec.instantiate(*args, **values)
        except ConfigError as error:
            raise _Mistake(error) from error

    return replace(spec, instantiate=instantiate, fields=tuple(map(_reflowed, spec.fields)))


def _reflowed(field: StructFieldSpec) -> StructFieldSpec:
    """Reflow a flag's help; a nested configuration has none, or tyro would tokenize its source."""

    def text() -> str | None:
        if is_dataclass(field.type):
            return None
        written = field.helptext() if callable(field.helptext) else field.helptext
        return " ".join(written.split()) if written else None

    kind: Any = field.type
    if field.default in ("", (), tyro.MISSING_NONPROP):  # no default to show
        kind = Annotated[kind, tyro.conf.arg(help_behavior_hint="")]
    return replace(field, helptext=text, type=kind)


def _plain_switches(argv: Sequence[str], defaults: Mapping[str, bool]) -> Iterator[str]:
    """Rewrite switches with a value into their presence or absence."""
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
    """Return the switch that a word names, or "", and whether the word switches it on."""
    name = flag.removeprefix("--").replace("-", "_")
    if not flag.startswith("--"):
        return "", False
    if name in defaults:
        return name, True
    off = name.removeprefix("no_")
    return (off, False) if name != off and off in defaults else ("", False)
