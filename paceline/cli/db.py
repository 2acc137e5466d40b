"""`paceline db`: the commands `create`, `convert` and `info` for image databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console

from paceline.cli.db_table import print_report
from paceline.cli.flags import parse
from paceline.cli.main import unknown_command
from paceline.cli.progress import meter
from paceline.config.db import DbConvertConfig, DbCreateConfig, DbInfoConfig
from paceline.data.db.convert import convert_database
from paceline.data.db.create import create_database
from paceline.data.db.inspect import inspect_database
from paceline.data.db.write.new_database import NewDatabase
from paceline.errors import many

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
    commands: dict[str, tuple[type[Any], str, Callable[[Any], int]]] = {
        "create": (DbCreateConfig, _CREATE, _create),
        "convert": (DbConvertConfig, _CONVERT, _convert),
        "info": (DbInfoConfig, _INFO, _info),
    }
    name, *arguments = argv
    if name not in commands:
        raise unknown_command(f"db {name}", commands)
    kind, description, run = commands[name]
    return run(parse(kind, arguments, prog=f"paceline db {name}", description=description))


def _create(config: DbCreateConfig) -> int:
    with meter("Writing", "files", Console(stderr=True)) as show:
        written = create_database(config, show)
    records = many(len(written.keys), "record")
    classes = many(len(written.classes), "class")
    lines = [f"{config.dest}: {records} in {classes}.", *_skipped(written, "unreadable image")]
    used = set(written.labels)
    empty = [name for label, name in enumerate(written.classes) if label not in used]
    if empty:
        lines.append(f"No images in: {', '.join(empty)}.")
    print(*lines, sep="\n")
    return 0


def _convert(config: DbConvertConfig) -> int:
    with meter("Converting", "records", Console(stderr=True)) as show:
        written = convert_database(config, show)
    what = many(len(written.keys), f"{written.format} record")
    print(f"{config.dest}: {what}.", *_skipped(written, "damaged record"), sep="\n")
    return 0


def _info(config: DbInfoConfig) -> int:
    with meter("Reading", "records", Console(stderr=True)) as show:
        report = inspect_database(config, show)
    print_report(report, Console())
    return 1 if report.damaged else 0


def _skipped(written: NewDatabase, unit: str) -> Iterator[str]:
    if written.skipped == 1:
        yield "1 file that isn't an image: skipped."
    elif written.skipped:
        yield f"{written.skipped:,} files that aren't images: skipped."
    if written.beside:
        images = many(len(written.beside), "image")
        yield (
            f"{images} beside the class folders, of no class: skipped (the first: "
            f"{written.beside[0]})."
        )
    if written.link_cycles:
        yield "Skipped links to a folder above them: " + ", ".join(written.link_cycles)
    yield from written.reduced.notes()
    if written.damaged:
        yield f"{many(len(written.damaged), unit)} skipped:"
        yield from (f"  {name}" for name in written.damaged)
