"""`paceline db`: the commands `create`, `convert` and `info` for image databases."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from paceline.cli.db_table import print_report
from paceline.cli.flags import parse
from paceline.cli.main import unknown_command
from paceline.cli.progress import meter
from paceline.config.db import DbConvertConfig, DbCreateConfig, DbInfoConfig
from paceline.data.db.convert import convert_database
from paceline.data.db.create import create_database
from paceline.data.db.inspect import inspect_database

_USAGE = """\
usage: paceline db COMMAND [OPTIONS]

  create FOLDER DEST    create a database from a folder with one subfolder per class
  convert SOURCE DEST   convert a database to another kind or record format
  info DB               read a whole database and report what is in it

Run 'paceline db COMMAND --help' for the options and examples of a command."""

_CREATE = """\
Create a database from a folder with one subfolder per class.

Examples:
  paceline db create photos/train train-lmdb
  paceline db create photos/train train-lmdb --resize 256
  paceline db create photos/train train-leveldb --db_type leveldb"""

_CONVERT = """\
Convert a database to another kind or format, or encode its images anew.

Keys, order and labels stay the same.

Examples:
  paceline db convert train-leveldb train-lmdb
  paceline db convert train.minidb train-lmdb --format datum
  paceline db convert train-lmdb train-raw --db_type minidb --encoding raw
  paceline db convert damaged-lmdb train-lmdb --skip_damaged"""

_INFO = """\
Read a whole database and report its records, format, image sizes and labels.

The exit status is 1 if a record is damaged.

Examples:
  paceline db info train-lmdb
  paceline db info /media/dvd/train-lmdb --cache_dir /tmp"""


def main(argv: Sequence[str]) -> int:
    """Run the command after `paceline db`; return its exit status.

    Raises:
        PacelineError: the command failed.
        SystemExit: help was requested (0), or the arguments are wrong (2).
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0 if argv else 2
    commands = {"create": _create, "convert": _convert, "info": _info}
    if argv[0] not in commands:
        raise unknown_command(f"db {argv[0]}", commands)
    return commands[argv[0]](argv[1:])


def _create(argv: Sequence[str]) -> int:
    config = parse(DbCreateConfig, argv, prog="paceline db create", description=_CREATE)
    with meter("Writing", "images", Console(stderr=True)) as show:
        created = create_database(config, show)
    lines = [f"{config.dest}: {created.records:,} records in {len(created.classes):,} classes."]
    if created.skipped:
        lines.append(f"{created.skipped:,} files that aren't images were skipped.")
    lines += _skipped("images", created.damaged)
    if created.empty_classes:
        lines.append(f"No images in: {', '.join(created.empty_classes)}.")
    return _print(lines)


def _convert(argv: Sequence[str]) -> int:
    config = parse(DbConvertConfig, argv, prog="paceline db convert", description=_CONVERT)
    with meter("Converting", "records", Console(stderr=True)) as show:
        converted = convert_database(config, show)
    lines = [f"{config.dest}: {converted.records:,} {converted.format} records."]
    return _print(lines + _skipped("records", converted.damaged))


def _info(argv: Sequence[str]) -> int:
    config = parse(DbInfoConfig, argv, prog="paceline db info", description=_INFO)
    with meter("Reading", "records", Console(stderr=True)) as show:
        report = inspect_database(config, show)
    print_report(report, Console())
    return 1 if report.damaged else 0


def _skipped(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [f"{len(names):,} damaged {what} were skipped:", *(f"  {name}" for name in names)]


def _print(lines: Sequence[str]) -> int:
    console = Console()
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0
