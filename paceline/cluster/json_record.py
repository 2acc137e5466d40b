"""Records of values that processes exchange as JSON, through a store or an environment variable."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from paceline.errors import CommError


class JsonRecord:
    """Base class of frozen dataclasses that convert to and from JSON."""

    def to_text(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self))  # type: ignore[call-overload]  # only dataclasses derive

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Read what `to_text` wrote.

        Raises:
            CommError: the text is something else.
        """
        try:
            record: Self = _read(cls, json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CommError(
                "A record that another process wrote can't be read: start all machines with the "
                "same version of Paceline, and with the same secret (--secret_file or "
                "PACELINE_SECRET) or all without one."
            ) from error
        return record


def _read(kind: Any, value: Any) -> Any:
    """Make a value of a type hint from JSON's lists and dicts."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _read(hints[name], entry) for name, entry in value.items()})
    if get_origin(kind) is UnionType:
        (other,) = (one for one in get_args(kind) if one is not NoneType)
        return None if value is None else _read(other, value)
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], entry) for entry in value)
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
