"""What `paceline db create`, `paceline db convert` and `paceline db info` are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from paceline.config.rules import at_least

DbType = Literal["lmdb", "leveldb", "minidb"]
RecordFormat = Literal["tensorprotos", "datum"]
Encoding = Literal["jpeg", "png", "raw"]


@dataclass(frozen=True, kw_only=True)
class DbCreateConfig:
    """Which images become which database."""

    folder: Positional[Annotated[Path, arg(metavar="FOLDER")]]
    """Images as FOLDER/<class>/…/<image>. Labels are the places
    of the classes' names in sorted order."""

    dest: Positional[Annotated[Path, arg(metavar="DEST")]]
    """The database: a folder that doesn't exist yet or is empty."""

    db_type: DbType = "lmdb"
    """Kind of database."""

    format: RecordFormat = "datum"
    """Format of the records: Datum (Caffe's), which Caffe2's
    trainer read by default, or TensorProtos (Caffe2's own)."""

    encoding: Encoding = "jpeg"
    """How images are stored. jpeg: a JPEG file's bytes untouched
    where no resizing is needed, others at quality 95.
    png: without loss. raw: decoded pixels."""

    resize: int | None = None
    """Scale each image, up or down, so that its short side has
    this many pixels. None: sizes stay."""

    shuffle_seed: int | None = 0
    """Write in an order shuffled with this seed, for readers that
    don't shuffle. None: sorted by class and file name."""

    skip_damaged: bool = False
    """Leave damaged images out, and count them, instead of ending
    at the first."""

    workers: int = 0
    """Threads that read, decode and encode. 0: one a core."""

    def __post_init__(self) -> None:
        at_least("workers", self.workers, 0)
        if self.resize is not None:
            at_least("resize", self.resize, 1, "leave it out to keep the sizes")


@dataclass(frozen=True, kw_only=True)
class DbConvertConfig:
    """Which database becomes which other one."""

    source: Positional[Annotated[Path, arg(metavar="SOURCE")]]
    """The database to read; its kind and the format of its
    records are seen in its files."""

    dest: Positional[Annotated[Path, arg(metavar="DEST")]]
    """The new database: a folder that doesn't exist yet or is
    empty."""

    db_type: DbType = "lmdb"
    """Kind of the new database."""

    format: RecordFormat | None = None
    """Format of the new records: Datum (Caffe's) or TensorProtos
    (Caffe2's). None: that of the old ones."""

    encoding: Literal["keep", "jpeg", "png", "raw"] = "keep"
    """How images are stored. keep: as they are. jpeg: quality 95,
    JPEG files untouched. png: without loss. raw: decoded pixels."""

    skip_damaged: bool = False
    """Leave damaged records out, and count them, instead of
    ending at the first."""

    cache_dir: Path | None = None
    """Where an index goes that can't be written beside a
    (read-only) source."""

    workers: int = 0
    """Threads that read, decode and encode. 0: one a core."""

    def __post_init__(self) -> None:
        at_least("workers", self.workers, 0)


@dataclass(frozen=True, kw_only=True)
class DbInfoConfig:
    """Which database is looked through."""

    path: Positional[Annotated[Path, arg(metavar="DB")]]
    """The database; its kind is seen in its files."""

    cache_dir: Path | None = None
    """Where an index goes that can't be written beside a
    (read-only) database."""

    workers: int = 0
    """Threads that read and decode. 0: one a core."""

    def __post_init__(self) -> None:
        at_least("workers", self.workers, 0)
