"""Configuration of the data: databases, image geometry and augmentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.db import DbType
from paceline.config.rules import at_least, positive, within
from paceline.errors import ConfigError

MAX_DECODE_WORKERS = 255
NO_DATA = "null"  # Caffe2's word for synthetic images


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Databases, image geometry and augmentation."""

    train_data: str
    """Path of the training database, or "null" for synthetic images."""

    test_data: str = ""
    """Path of the test database; if empty, evaluation is skipped."""

    db_type: DbType = "lmdb"
    """Kind of both databases. The record format (TensorProtos or Datum) is detected from the
    records."""

    num_channels: int = 3
    """Number of colour channels of the model's input: 3 (RGB) or 1 (grey)."""

    image_size: int = 227
    """Height and width of the model's input, in pixels."""

    num_labels: int = 1000
    """Number of classes; labels are 0 to num_labels - 1."""

    epoch_size: int = 1_500_000
    """Images per epoch. A smaller database is used in full; from a larger one, each epoch uses a
    different subset."""

    test_epoch_size: int = 50_000
    """Test images per evaluation; a smaller database is used in full."""

    image_mean_per_channel: tuple[float, ...] = (128.0,)
    """Mean of each channel on the 0 to 255 scale, space-separated; a single value applies to all
    channels."""

    image_std_per_channel: tuple[float, ...] = (128.0,)
    """Standard deviation of each channel on the 0 to 255 scale, space-separated; a single value
    applies to all channels."""

    augment: Literal["caffe2", "inception", "pad", "none"] = "caffe2"
    """caffe2: resize the short side to --scale, random crop, random flip. inception: random area
    and aspect ratio, random flip. pad: pad by 4 pixels on each side, random crop, random flip
    (CIFAR). none: centre crop."""

    scale: int = 256
    """Length of the short side before the crop, in pixels (training with caffe2; evaluation with
    caffe2 and inception)."""

    color_jitter: float = 0.0
    """Strength of random brightness, contrast and saturation; 0 disables it, 0.4 is usual."""

    decode_workers: int | None = None
    """Decoding processes per worker; 0 decodes in the training process. By default the number is
    measured: as many as keep the training steps from waiting for images, up to the worker's share
    of the machine's cores less one."""

    decode_threads: int = 0
    """An older name of --decode_workers, in which 0 means that the number is measured."""

    decode_device: Literal["cpu", "cuda", "auto"] = "cpu"
    """Where JPEG files are decoded. cpu: by --decode_workers. cuda: on the GPU by nvJPEG; it needs
    torchvision, and its pixels differ slightly from those of cpu. auto: measures both in the first
    steps and keeps the faster."""

    bad_records: Literal["stop", "skip"] = "stop"
    """Action on an unreadable record. stop: end the run and report the record. skip: skip it and
    count it in the log and the ledger."""

    cache_dir: str = ""
    """Folder for the index of a database whose own folder is read-only."""

    def __post_init__(self) -> None:
        at_least(self, 1, "image_size", "num_labels", "epoch_size", "test_epoch_size", "scale")
        if self.num_channels not in (1, 3):
            raise ConfigError(f"--num_channels {self.num_channels}: must be 1 (grey) or 3 (RGB).")
        if self.augment in ("caffe2", "inception") and self.scale < self.image_size:
            raise ConfigError(
                f"--scale {self.scale} is smaller than --image_size {self.image_size}, so there is "
                f"no room for a crop; use --scale {round(self.image_size * 256 / 224)}."
            )
        within("color_jitter", self.color_jitter, 0, 1)
        within("decode_threads", self.decode_threads, 0, MAX_DECODE_WORKERS + 1)
        if self.decode_workers is not None:
            self._check_decode_workers(self.decode_workers)
        self._check_normalisation()

    @property
    def fixed_decode_workers(self) -> int | None:
        """The number of decode processes that the user gave; None: it is measured."""
        return self.decode_threads or None if self.decode_workers is None else self.decode_workers

    def _check_decode_workers(self, workers: int) -> None:
        within("decode_workers", workers, 0, MAX_DECODE_WORKERS + 1)
        if self.decode_threads not in (0, workers):
            raise ConfigError(
                f"--decode_threads {self.decode_threads} and --decode_workers {workers} name one "
                "number, but differ: give --decode_workers alone."
            )

    def _check_normalisation(self) -> None:
        for flag in ("image_mean_per_channel", "image_std_per_channel"):
            values = getattr(self, flag)
            if len(values) not in (1, self.num_channels):
                raise ConfigError(
                    f"--{flag} has {len(values)} values: give a single value or one per channel "
                    f"({self.num_channels})."
                )
        for value in self.image_mean_per_channel:
            within("image_mean_per_channel", value, -1000, 1000)
        for value in self.image_std_per_channel:
            positive("image_std_per_channel", value)

    def each_channel(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """Return the value of each channel, where one value may be given for all."""
        return values * self.num_channels if len(values) == 1 else values
