"""Records of values that processes exchange as JSON, through a store or an environment variable."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from paceline.errors import CommError


class JsonRecord:
    """Base class of frozen dataclasses that convert to and from JSON."""

    def to_text(self) -> str:
        """Return the record as JSON."""
        return json.dumps(_plain(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Read what `to_text` wrote.

        Raises:
            CommError: the text is something else.
        """
        kind: Any = cls
        try:
            record: Self = _reader(kind)(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CommError(
                "A record that another process wrote can't be read: start all machines with the "
                "same version of Paceline, and with the same secret (--secret_file or "
                "PACELINE_SECRET) or all without one."
            ) from error
        return record


def _plain(value: Any) -> Any:
    """Return JSON's dicts and lists of a record's value; faster than `dataclasses.asdict`."""
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    kind: Any = type(value)
    names = _names(kind)
    return {name: _plain(getattr(value, name)) for name in names} if names is not None else value


@cache
def _names(kind: Any) -> tuple[str, ...] | None:
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else None


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return what makes a value of a type hint from JSON's lists and dicts."""
    if isinstance(kind, type) and is_dataclass(kind):
        readers: dict[str, Callable[[Any], Any]] = {}

        def read_record(value: Any) -> Any:
            if not readers:  # here, because a kind may contain itself
                readers.update({name: _reader(one) for name, one in get_type_hints(kind).items()})
            return kind(**{name: readers[name](entry) for name, entry in value.items()})

        return read_record
    if get_origin(kind) is UnionType:
        (other,) = (one for one in get_args(kind) if one is not NoneType)
        read = _reader(other)
        return lambda value: None if value is None else read(value)
    if get_origin(kind) is tuple:
        entry_of = _reader(get_args(kind)[0])
        return lambda value: tuple(map(entry_of, value))
    return lambda value: value
