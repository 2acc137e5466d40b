"""What `paceline db create` and `paceline db info` are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from paceline.config.rules import at_least
from paceline.errors import ConfigError

DbType = Literal["lmdb", "leveldb"]
Encoding = Literal["jpeg", "png", "raw"]


@dataclass(frozen=True, kw_only=True)
class DbCreateConfig:
    """Which images become which database."""

    folder: Positional[Path]
    """Folder of class folders: FOLDER/<class>/…/<image>. Labels are the sorted class names."""

    dest: Positional[Path]
    """The database: a folder that doesn't exist yet or is empty."""

    db_type: DbType = "lmdb"
    """Kind of database."""

    format: Literal["tensorprotos", "datum"] = "datum"
    """Record format: Datum (Caffe's, which Caffe2's trainer read) or TensorProtos (Caffe2's)."""

    encoding: Encoding = "jpeg"
    """How images are stored. jpeg: the bytes of a JPEG file untouched where no resizing is needed,
    others at quality 95. png: without loss. raw: decoded pixels."""

    resize: int | None = None
    """Scale each image, up or down, so that its short side has this many pixels; by default sizes
    stay."""

    shuffle_seed: int | None = 0
    """Records are written in an order shuffled with this seed, which suits readers that don't
    shuffle; None keeps the sorted order of class and file names."""

    skip_damaged: bool = False
    """Leave damaged images out and count them; by default the first one ends the command."""

    workers: int = 0
    """Threads that read, decode and encode; 0 is one a core."""

    def __post_init__(self) -> None:
        at_least("workers", self.workers, 0)
        if self.resize is not None:
            at_least("resize", self.resize, 1, "leave it out to keep the sizes")
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder} isn't a folder: give a folder of class folders.")
        if self.dest.resolve().is_relative_to(self.folder.resolve()):
            raise ConfigError(
                f"{self.dest} lies in {self.folder}, whose subfolders are classes: choose a place "
                "outside."
            )


@dataclass(frozen=True, kw_only=True)
class DbInfoConfig:
    """Which database is looked through."""

    path: Positional[Path]
    """The database; its kind is seen in its files."""

    cache_dir: Path | None = None
    """Where an index goes that can't be written beside a (read-only) database."""

    workers: int = 0
    """Threads that decode; 0 is one a core."""

    def __post_init__(self) -> None:
        at_least("workers", self.workers, 0)
        if not self.path.exists():
            raise ConfigError(f"{self.path} doesn't exist: give the folder of a database.")
