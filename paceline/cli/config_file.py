"""Files of flags: `--config run.toml`, whose lines become words of the command line.

    batch_size = 64                          --batch_size=64
    image_mean_per_channel = [125, 123, 114]  --image_mean_per_channel 125 123 114

They come before the user's own words, of which the last one of a flag counts. So the flags of the
command line win, and the workers, which get the words, don't read the file again.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from paceline.cli.flags import FOREIGN, flag_of, options
from paceline.errors import ConfigError, Message

_FLAG = "config"
# Flags of which a user gives one: it replaces all of them in the file.
_ALTERNATIVES = (
    frozenset({"gpus", "num_gpus", "num_workers"}),
    frozenset({"model", "num_layers"}),
    frozenset({"decode_workers", "decode_threads"}),
    frozenset({"file_store_path", "redis_host", "redis_url", "etcd", "master"}),
)
_RULES = {
    bool: "true or false",
    int: "a whole number, such as 32",
    float: "a number, such as 0.1",
    str: 'text in quotes, such as "cosine"',
}

_LISTS = {
    float: "numbers, such as [125.0, 123.0, 114.0]",
    str: 'texts, such as ["layer1.*", "layer2.*"]',
}


def with_file(argv: Sequence[str], config: type) -> list[str]:
    """Replace `--config FILE` by the flags of the file, before all others.

    Args:
        argv: the words of a command line.
        config: the configuration that they are of.

    Raises:
        ConfigError: the file can't be read, or has a flag or value that there isn't; names them.
    """
    kinds = {name: kind for name, _, kind in options(config) if name != _FLAG}
    own = list(argv)
    files: list[str] = []
    while (at := next((i for i, word in enumerate(own) if flag_of(word) == _FLAG), -1)) >= 0:
        _, equals, path = own[at].partition("=")
        if not equals and at + 1 == len(own):
            raise ConfigError(flag=_FLAG, rule="give the path of a TOML file")
        files.append(path if equals else own[at + 1])
        del own[at : at + (1 if equals else 2)]
    given = {flag_of(word) for word in own}
    given |= {name.removeprefix("no_") for name in given}
    for group in _ALTERNATIVES:
        given |= group if given & group else set()
    flags = {name: value for path in files for name, value in _read(path, kinds).items()}
    return [*_words({name: flags[name] for name in flags if name not in given}), *own]


def _words(flags: Mapping[str, Any]) -> Iterator[str]:
    for name, value in flags.items():
        if isinstance(value, list):
            yield from [f"--{name}", *map(str, value)] if value else []
        else:
            yield f"--{name}={value}"


def _read(path: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of a file, each of its type."""
    try:
        with Path(path).open("rb") as file:
            flags = tomllib.load(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no TOML: {error}"
        raise ConfigError(
            flag=_FLAG,
            value=path,
            rule=f"the file can't be read ({reason})",
            remedy="give a file with lines such as batch_size = 64, or a run's config.toml",
        ) from error
    for name, value in flags.items():
        if name not in kinds:
            near = [FOREIGN.get(name, ""), *difflib.get_close_matches(name, kinds, n=1)]
            nearest = next((known for known in near if known in kinds), "")
            hint = f"did you mean {nearest}?" if nearest else "see paceline train --help."
            raise ConfigError(Message("{--config} {}: there is no flag {}; {}", path, name, hint))
        rule = _broken_rule(value, kinds[name])
        if rule:
            raise ConfigError(
                Message("{--config} {}: {} = {!r}: must be {}.", path, name, value, rule)
            )
    return flags


def _broken_rule(value: object, kind: Any) -> str:
    """Return what a value must be that isn't of the type of its flag; "" where it is."""
    if get_origin(kind) is Literal:
        names = get_args(kind)
        return "" if value in names else f"one of {', '.join(map(str, names))}"
    if get_origin(kind) is tuple:
        values = value if isinstance(value, list) else [value]
        of = get_args(kind)[0]
        fits = (values or of is str) and not any(_broken_rule(one, of) for one in values)
        return "" if fits else _LISTS[of]
    kinds = [one for one in get_args(kind) if one is not NoneType] or [kind]
    fits = type(value) in kinds or (kinds == [float] and type(value) is int)
    return "" if fits else _RULES[kinds[0]]
