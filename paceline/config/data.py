"""Which images a run reads, and what becomes of them before the model sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.db import DbType
from paceline.config.rules import at_least, positive, within
from paceline.errors import ConfigError

NO_DATA = "null"  # Caffe2's word for made-up images


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Databases, image geometry and augmentation."""

    train_data: str
    """Path of the training database; "null" makes images up."""

    test_data: str = ""
    """Path of the test database; without one there is no evaluation."""

    db_type: DbType = "lmdb"
    """Kind of both databases. The record format, TensorProtos or Datum, is seen in the records."""

    num_channels: int = 3
    """Colour channels that the model sees: 3 (RGB) or 1 (grey)."""

    image_size: int = 227
    """Height and width that the model sees, in pixels."""

    num_labels: int = 1000
    """Number of classes; labels are 0 to num_labels - 1."""

    epoch_size: int = 1_500_000
    """Images an epoch; a smaller database counts as it is, of a larger one each epoch takes
    another selection."""

    test_epoch_size: int = 50_000
    """Test images an evaluation; a smaller database counts as it is."""

    image_mean_per_channel: tuple[float, ...] = (128.0,)
    """Subtracted from each channel (0 to 255), separated by blanks; one value serves all."""

    image_std_per_channel: tuple[float, ...] = (128.0,)
    """Each channel is divided by it, separated by blanks; one value serves all."""

    augment: Literal["caffe2", "inception", "pad", "none"] = "caffe2"
    """caffe2: short side to --scale, random crop, mirror. inception: random area and aspect,
    mirror. pad: 4 pixels around, random crop, mirror (CIFAR). none: centre crop."""

    scale: int = 256
    """Short side before the crop, in pixels (caffe2's training, and tests after inception's)."""

    color_jitter: float = 0.0
    """Strength of random brightness, contrast and saturation; 0 is off, 0.4 is usual."""

    decode_threads: int = 0
    """Threads that decode images for one worker; 0 shares the machine's cores among workers."""

    bad_records: Literal["stop", "skip"] = "stop"
    """What a record that can't be read does: stop ends the run and names it; skip leaves it out
    and counts it in log and ledger."""

    cache_dir: str = ""
    """Where indexes go that can't be written beside a (read-only) database."""

    def __post_init__(self) -> None:
        for flag in ("image_size", "num_labels", "epoch_size", "test_epoch_size", "scale"):
            at_least(flag, getattr(self, flag), 1)
        if self.num_channels not in (1, 3):
            raise ConfigError(f"--num_channels {self.num_channels}: must be 1 (grey) or 3 (RGB).")
        if self.augment in ("caffe2", "inception") and self.scale < self.image_size:
            raise ConfigError(
                f"--scale {self.scale} is smaller than --image_size {self.image_size}: a crop must "
                f"fit in; give --scale {round(self.image_size * 256 / 224)} or so."
            )
        within("color_jitter", self.color_jitter, 0, 1)
        at_least("decode_threads", self.decode_threads, 0)
        self._check_normalisation()

    def _check_normalisation(self) -> None:
        for flag in ("image_mean_per_channel", "image_std_per_channel"):
            values = getattr(self, flag)
            if len(values) not in (1, self.num_channels):
                raise ConfigError(
                    f"--{flag} has {len(values)} values: give one for all or one for each of the "
                    f"{self.num_channels} channels."
                )
        for value in self.image_mean_per_channel:
            within("image_mean_per_channel", value, -1000, 1000)
        for value in self.image_std_per_channel:
            positive("image_std_per_channel", value)

    @property
    def mean(self) -> tuple[float, ...]:
        """The mean of each channel, in 0 to 255."""
        return self._each_channel(self.image_mean_per_channel)

    @property
    def std(self) -> tuple[float, ...]:
        """The standard deviation of each channel, in 0 to 255."""
        return self._each_channel(self.image_std_per_channel)

    def _each_channel(self, values: tuple[float, ...]) -> tuple[float, ...]:
        return values * self.num_channels if len(values) == 1 else values
