"""`paceline zoo`: the models by name, their sizes and published accuracies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase

from rich.console import Console

from paceline.cli.flags import parse
from paceline.cli.tables import table_console, table_of
from paceline.config.zoo import ZooConfig
from paceline.errors import ConfigError
from paceline.models.other_zoos import ZOOS, ZooEntry
from paceline.models.zoo import count_parameters, own_entries

_DESCRIPTION = """\
List models: names for --model and --weights, sizes, published accuracies.

torchvision's and timm's are listed where these packages are installed.

Examples:
  paceline zoo
  paceline zoo "torchvision:efficientnet*"
  paceline zoo "timm:vit_tiny*" --json"""
_COUNTED = 50  # models, each of which takes a tenth of a second
_LABELS = 1000


def main(argv: Sequence[str]) -> int:
    """Run the command after `paceline zoo`; return its exit status.

    Raises:
        ConfigError: no model has such a name.
        SystemExit: help was requested (0), or the arguments are wrong (2).
    """
    config = parse(ZooConfig, argv, prog="paceline zoo", description=_DESCRIPTION)
    missing: dict[str, str] = {}
    found = [one for one in _entries(missing) if fnmatchcase(one.name, config.pattern)]
    prefix, colon, _ = config.pattern.partition(":")
    reasons = [text for zoo, text in missing.items() if fnmatchcase(zoo, prefix)]
    if not found:
        more = f". {reasons[0]}" if reasons and colon else "; leave it out to list all models."
        raise ConfigError(f"paceline zoo: no model matches {config.pattern!r}{more}")
    if len(found) <= _COUNTED:
        found = [_counted(one) for one in found]
    if config.json:
        for one in found:
            print(json.dumps(asdict(one)))
        return 0
    _print(found, table_console())
    for reason in reasons:
        print(reason)
    return 0


def _entries(missing: dict[str, str]) -> Iterator[ZooEntry]:
    """List all models that there are; note what keeps a package's from being listed."""
    yield from own_entries()
    for zoo in ZOOS.values():
        try:
            yield from zoo.entries()
        except ConfigError as error:
            missing[zoo.extra] = str(error)


def _counted(entry: ZooEntry) -> ZooEntry:
    if entry.parameters is not None:
        return entry
    return replace(entry, parameters=count_parameters(entry.name, _LABELS))


def _print(entries: Sequence[ZooEntry], console: Console) -> None:
    table = table_of("model", "parameters", "top-1", "of", "weights")
    for one in entries:
        count = "" if one.parameters is None else f"{one.parameters / 1e6:.2f} M"
        accuracy = "" if one.accuracy is None else f"{one.accuracy:.1%}"
        table.add_row(one.name, count, accuracy, one.data, one.weights)
    console.print(table)
