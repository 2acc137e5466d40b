"""`paceline db create` makes a database of a folder of images; `paceline db info` reads one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from rich.console import Console

from paceline.cli.db_table import print_report
from paceline.cli.flags import parse
from paceline.cli.progress import meter
from paceline.config.db import DbCreateConfig, DbInfoConfig
from paceline.data.create import Created, create_database
from paceline.data.inspect import inspect_database
from paceline.errors import ConfigError

_USAGE = """\
usage: paceline db COMMAND [OPTIONS]

  create FOLDER DEST   make a database of a folder of class folders
  info DB              read a whole database and report what is in it

paceline db COMMAND --help tells a command's options, with examples."""

_CREATE = """\
Make a database of a folder of class folders.

Examples:
  paceline db create photos/train train-lmdb
  paceline db create photos/train train-lmdb --resize 256
  paceline db create photos/train train-leveldb --db_type leveldb --format tensorprotos"""

_INFO = """\
Read a whole database and report its records, format, image sizes and labels.
The exit status is 1 if a record is damaged.

Examples:
  paceline db info train-lmdb
  paceline db info /media/dvd/train-lmdb --cache_dir /tmp"""


def main(argv: Sequence[str]) -> int:
    """Run the command after `paceline db`; return its exit status.

    Raises:
        PacelineError: it failed; the text is for the person.
        SystemExit: help was asked for (0), or the arguments are wrong (2).
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0 if argv else 2
    return _command(argv[0])(argv[1:])


def _command(name: str) -> Callable[[Sequence[str]], int]:
    commands = {"create": _create, "info": _info}
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(commands)}."
        raise ConfigError(f"no command 'db {name}': {hint}")
    return commands[name]


def _create(argv: Sequence[str]) -> int:
    config = parse(DbCreateConfig, argv, prog="paceline db create", description=_CREATE)
    with meter("Writing", "images", Console(stderr=True)) as show:
        created = create_database(config, show)
    for line in _told(config, created):
        Console().print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


def _info(argv: Sequence[str]) -> int:
    config = parse(DbInfoConfig, argv, prog="paceline db info", description=_INFO)
    with meter("Reading", "records", Console(stderr=True)) as show:
        report = inspect_database(config, show)
    print_report(report, Console())
    return 1 if report.damaged else 0


def _told(config: DbCreateConfig, created: Created) -> list[str]:
    lines = [f"{config.dest}: {created.records:,} records in {len(created.classes):,} classes."]
    if created.skipped:
        lines.append(f"{created.skipped:,} files that aren't images were skipped.")
    if created.damaged:
        lines.append(f"{len(created.damaged):,} damaged images were left out:")
        lines.extend(f"  {name}" for name in created.damaged)
    if created.empty_classes:
        lines.append(f"No images in: {', '.join(created.empty_classes)}.")
    return lines
