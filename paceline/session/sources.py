"""Databases of a run, opened, and their orders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.config.data import NO_DATA, DataConfig
from paceline.config.train import TrainConfig
from paceline.data.db.index.database_index import LABELS_NAME, write_label_names
from paceline.data.db.open_database import open_database
from paceline.data.decoding.usable_cores import usable_cores
from paceline.data.order import Order
from paceline.data.source import Source
from paceline.data.synthetic import SyntheticSource
from paceline.errors import ConfigError, DataError, many

SYNTHETIC_RECORDS = 2048  # of an epoch of synthetic images, where --epoch_size is larger


@dataclass(frozen=True, kw_only=True)
class Databases:
    """Source of training images, and optional source of test images."""

    train: Source
    test: Source | None

    def close(self) -> None:
        """Close both."""
        self.train.close()
        if self.test is not None:
            self.test.close()


def open_sources(config: TrainConfig) -> Databases:
    """Open the databases and check what can be known of them at once.

    Raises:
        ConfigError: a path, a label beyond `num_labels` that isn't to be skipped, other classes in
            the test data, or fewer samples than workers.
        DataError: not a database, or one of unknown records.
    """
    data = config.data
    seed = config.optim.seed
    train = open_source("train_data", data.train_data, data, seed)
    if min(len(train), data.epoch_size) < config.world.workers:
        raise ConfigError(
            f"--train_data {data.train_data}: {many(min(len(train), data.epoch_size), 'sample')} "
            f"for {config.world.workers} workers; at least one sample per worker is needed."
        )
    if not data.test_data:
        return Databases(train=train, test=None)
    test = open_source("test_data", data.test_data, data, seed + 1)
    names = train.label_names, test.label_names
    if None not in names and names[0] != names[1]:
        raise ConfigError(
            f"--test_data {data.test_data}: its classes {_some(names[1])} differ from those of the "
            f"training data, {_some(names[0])}; create both databases from folders with the same "
            "classes."
        )
    return Databases(train=train, test=test)


def write_class_names(folder: Path, databases: Databases) -> None:
    """Write the classes' names, where they are known, to a run's folder.

    Raises:
        DataError: the file can't be written.
    """
    path = folder / LABELS_NAME
    if databases.train.label_names is None:
        return
    try:
        write_label_names(path, databases.train.label_names)
    except OSError as error:
        raise DataError(
            f"{path}: the names of the classes can't be written ({error.strerror}); make room, or "
            "give another --output_dir."
        ) from error


def order_of(config: TrainConfig, size: int, *, train: bool = True) -> Order:
    """Make the order of a source of `size` records, for training or for evaluation."""
    return Order(
        size=size,
        batch_size=config.global_batch,
        seed=config.optim.seed,
        epoch_size=config.data.epoch_size if train else config.data.test_epoch_size,
        shuffle=train,
    )


def cores_per_worker(local_world_size: int) -> int:
    """Return this machine's cores, those this process may use, shared among its workers."""
    return max(1, usable_cores() // local_world_size)


def open_source(flag: str, path: str, data: DataConfig, seed: int) -> Source:
    """Open a database, or synthetic images.

    Args:
        flag: the option that names it.
        path: its path, or "null".
        data: the kind of the database, and the number of classes.
        seed: of synthetic images.

    Raises:
        ConfigError: there is no such database, or labels beyond `num_labels` aren't to be skipped.
        DataError: not a database, or one of unknown records.
    """
    if path == NO_DATA:
        size = data.epoch_size if flag == "train_data" else data.test_epoch_size
        return SyntheticSource(
            records=min(size, SYNTHETIC_RECORDS),
            image_size=data.image_size,
            channels=data.num_channels,
            num_labels=data.num_labels,
            seed=seed,
        )
    if not path or not _may_be_there(Path(path)):  # a shell's variable may be empty
        shown = path or "''"
        raise ConfigError(f"--{flag} {shown}: there is no such database; check the path.")
    cache = Path(data.cache_dir) if data.cache_dir else None
    source = open_database(Path(path), data.db_type, cache_dir=cache)
    beyond = labels_beyond(source, data.num_labels)
    if beyond and (data.bad_records == "stop" or beyond == len(source)):
        assert source.labels is not None
        source.close()
        raise ConfigError(
            f"--num_labels {data.num_labels}: {path} has labels up to {source.labels.max()}; "
            f"give at least {source.labels.max() + 1}."
        )
    return source


def labels_beyond(source: Source, num_labels: int) -> int:
    """Count the records whose label is `num_labels` or more, as far as the index knows labels."""
    return 0 if source.labels is None else int((source.labels >= num_labels).sum())


def _may_be_there(path: Path) -> bool:
    """Return whether a path exists, or may in an unreadable folder: the source reports that."""
    try:
        return path.exists()
    except PermissionError:
        return True


def _some(names: tuple[str, ...] | None) -> str:
    """Name the first few of a list."""
    assert names is not None
    return ", ".join(names[:5]) + (f", … ({len(names)})" if len(names) > 5 else "")
