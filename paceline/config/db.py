"""Configurations of `paceline db create`, `paceline db convert` and `paceline db info`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from paceline.config.rules import at_least
from paceline.errors import ConfigError

DbType = Literal["lmdb", "leveldb", "minidb"]
RecordFormat = Literal["tensorprotos", "datum"]
Encoding = Literal["jpeg", "png", "raw"]


@dataclass(frozen=True, kw_only=True)
class DbCreateConfig:
    """Options of `paceline db create`."""

    folder: Positional[Annotated[Path, arg(metavar="FOLDER")]]
    """Images as FOLDER/<class>/…/<image>. Labels are the
    indices of the class names in sorted order."""

    dest: Positional[Annotated[Path, arg(metavar="DEST")]]
    """Folder of the new database; it must not exist or must be
    empty."""

    db_type: DbType = "lmdb"
    """Kind of database."""

    format: RecordFormat = "datum"
    """Record format: Datum (Caffe; the default of Caffe2's
    trainer) or TensorProtos (Caffe2)."""

    encoding: Encoding = "jpeg"
    """Encoding of the images. jpeg: keep JPEG files unchanged
    unless they are resized; encode other images as JPEG with
    quality 95. png: lossless. raw: decoded pixels."""

    resize: int | None = None
    """Scale each image, up or down, so that its short side has
    this many pixels. None: keep the original sizes."""

    value_range: tuple[float, float] | None = None
    """The values that become black and white in grey images of
    more than 8 bits. None: 0, and the largest that the format
    has room for; images whose format states none, such as TIFF
    of 32 bits, are then refused."""

    shuffle_seed: int | None = 0
    """Seed of the random order in which records are written, for
    programs that read records sequentially. None: sort by class
    and file name."""

    skip_damaged: bool = False
    """Skip and list images that can't be read instead of stopping
    at the first one."""

    workers: int = 0
    """Processes that read, decode and encode, this command's
    included; fewer than 200 images take one. 0: one per core."""

    def __post_init__(self) -> None:
        at_least(self, 0, "workers")
        if self.resize is not None:
            at_least(self, 1, "resize", remedy="omit it to keep the original sizes")
        _check_value_range(self.value_range)


@dataclass(frozen=True, kw_only=True)
class DbConvertConfig:
    """Options of `paceline db convert`."""

    source: Positional[Annotated[Path, arg(metavar="SOURCE")]]
    """Database to read; its kind and record format are detected
    from its files."""

    dest: Positional[Annotated[Path, arg(metavar="DEST")]]
    """Folder of the new database; it must not exist or must be
    empty."""

    db_type: DbType = "lmdb"
    """Kind of the new database."""

    format: RecordFormat | None = None
    """Format of the new records: Datum (Caffe) or TensorProtos
    (Caffe2). None: keep the format."""

    encoding: Literal["keep", "jpeg", "png", "raw"] = "keep"
    """Encoding of the images. keep: unchanged. jpeg: keep JPEG
    files unchanged, encode other images with quality 95.
    png: lossless. raw: decoded pixels."""

    value_range: tuple[float, float] | None = None
    """The values that become black and white in grey images of
    more than 8 bits. None: 0, and the largest that the format
    has room for; images whose format states none, such as TIFF
    of 32 bits, are then refused."""

    skip_damaged: bool = False
    """Skip and count damaged records instead of stopping at the
    first one."""

    cache_dir: Path | None = None
    """Folder for the index of a database whose own folder is
    read-only."""

    workers: int = 0
    """Processes that read, decode and encode, this command's
    included; fewer than 200 records take one. 0: one per core."""

    def __post_init__(self) -> None:
        at_least(self, 0, "workers")
        _check_value_range(self.value_range)


@dataclass(frozen=True, kw_only=True)
class DbInfoConfig:
    """Options of `paceline db info`."""

    path: Positional[Annotated[Path, arg(metavar="DB")]]
    """Database; its kind is detected from its files."""

    cache_dir: Path | None = None
    """Folder for the index of a database whose own folder is
    read-only."""

    workers: int = 0
    """Processes that read and decode, this command's included;
    fewer than 200 records take one. 0: one per core."""

    def __post_init__(self) -> None:
        at_least(self, 0, "workers")


def _check_value_range(value_range: tuple[float, float] | None) -> None:
    low, high = value_range or (0, 1)
    if not -math.inf < low < high < math.inf:
        raise ConfigError(
            flag="value_range",
            value=f"{low:g} {high:g}",
            rule="the first value, black, must be less than the second, white",
            remedy="give two numbers, such as 0 4095",
        )
