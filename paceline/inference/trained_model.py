"""Trained model, as the file of its weights describes it: form of the images, class names.

    runs/digits/resnet20_best.pt    the weights and their description (`state/weights_about.py`);
                                    resnet20_model.pt are those of the last epoch

Files of earlier versions have no description; the run's folder has:

    runs/digits/config.toml         model, number of classes, size and normalisation of the images
    runs/digits/labels.txt          the names of the classes, if the database had them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from paceline.config.train import TrainConfig, config_of
from paceline.data.db.index.database_index import read_label_names
from paceline.errors import (
    CheckpointError,
    ConfigError,
    Message,
    PacelineError,
    user_named_file,
)
from paceline.run.precision import Precision
from paceline.run.predictor import Predictor
from paceline.state.run_folder import read_configuration
from paceline.state.weights import check_weights, load_weights, weights_files
from paceline.state.weights_about import read_description
from paceline.wiring.model import make_model


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """Trained model, which classifies images.

    Attributes:
        config: the run's configuration.
        weights: the file of the weights.
        classes: the names of the classes, label 0 first; None: they aren't known.
        model: the module, on its device.
        device: where it computes.
        workers: of the run, which each had a slice of a batch; None: unknown.
        threads: that computed a slice; None: unknown.
    """

    config: TrainConfig
    weights: Path
    classes: Sequence[str] | None
    model: nn.Module
    device: torch.device
    workers: int | None
    threads: int | None

    @classmethod
    def read(cls, folder: Path | None, device: torch.device, weights: str = "") -> Self:
        """Read a trained model from a file of weights, or the newest one of a run.

        Args:
            folder: the run's; None: there is none, and the file describes the model.
            device: where it is to compute.
            weights: "best" or "last", or the path of a file; "": the best ones if there are some.

        Raises:
            ConfigError: the run was made by another program than `paceline train`, has no weights
                yet, or the file is another model's, or has no description and no run.
            CheckpointError: the file is damaged.
        """
        if weights not in ("", "best", "last"):
            with user_named_file():
                return cls._of_file(folder, device, Path(weights))
        assert folder is not None, "a run, or a file"
        return cls._of_file(folder, device, _weights_of(folder, weights))

    @classmethod
    def _of_file(cls, folder: Path | None, device: torch.device, file: Path) -> Self:
        check_weights(file, "weights")
        described = read_description(file)
        if folder is not None and described:
            _require_model_of_run(folder, file, described)
        about = described or _description_of(folder, file)
        config = _config_of(file, about)
        model = make_model(config, device).eval()
        load_weights(file, model, flag="weights", whole=True)
        return cls(
            config=config,
            weights=file,
            classes=about.get("classes"),
            model=model,
            device=device,
            workers=about.get("workers"),
            threads=about.get("threads"),
        )

    @cached_property
    def names(self) -> Sequence[str]:
        """A name for each output of the model: its class's, or the label where none is known."""
        outputs = self.config.data.num_labels
        known = (self.classes or ())[:outputs]  # there may be more outputs than classes, or fewer
        return (*known, *map(str, range(len(known), outputs)))

    @cached_property
    def predictor(self) -> Predictor:
        """The model's forward pass, in the precision of the training."""
        return Predictor(
            model=self.model,
            precision=Precision(self.config.model.dtype, self.device),
            num_labels=self.config.data.num_labels,
        )


def _weights_of(folder: Path, weights: str) -> Path:
    """Return the file of a run's folder that has the weights.

    Raises:
        ConfigError: there is none.
    """
    last, best = weights_files(folder, config_of(_flags_of(folder)).model.weights_name)
    files = {"": [best, last], "best": [best], "last": [last]}[weights]
    for file in files:
        if file.is_file():
            return file
    raise ConfigError(
        Message(
            "{} isn't there: a run writes its weights after each epoch, and its best ones where it "
            "has test data; wait for that, or give the path of a file as {--weights}.",
            files[0],
        )
    )


def _require_model_of_run(folder: Path, file: Path, described: Mapping[str, Any]) -> None:
    """Require that a file of weights describes the model that the run has.

    Raises:
        ConfigError: it describes another one, whose scores would pass for the run's.
    """
    flags = read_configuration(folder)
    found, wanted = (_model_in(about) for about in (described, flags))
    if "image_size" in flags and None not in (*found, *wanted) and found != wanted:
        raise ConfigError(
            Message(
                "{--weights} {}: it has a {}, and the run {} a {}; give the file in place of the "
                "run.",
                file,
                "{} for {} classes and {} channels".format(*found),
                folder.name,
                "{} for {} classes and {} channels".format(*wanted),
            )
        )


def _model_in(about: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(about.get(flag) for flag in ("model", "num_labels", "num_channels"))


def _description_of(folder: Path | None, file: Path) -> dict[str, Any]:
    """Return the description that a run's folder has of its weights.

    Raises:
        ConfigError: there is no run, or it has none.
    """
    if folder is None:
        raise ConfigError(
            Message(
                "{} has no description of its model inside (name, classes, size of the images), as "
                "a run's weights have, and isn't in the folder of a run: give a run of the same "
                "model, and the file as {--weights}.",
                file,
            )
        )
    return {**_flags_of(folder), "classes": read_label_names(folder)}


def _flags_of(folder: Path) -> dict[str, Any]:
    flags = read_configuration(folder)
    if "image_size" not in flags:
        raise ConfigError(
            f"{folder}: it is the run of a script, whose model only that script knows; load the "
            'entry "model" of its checkpoint, or of each of its parts, by torch.load().'
        )
    return flags


def _config_of(file: Path, about: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of a described model, without what concerns training alone.

    Raises:
        CheckpointError: a value is of another type than its flag's.
    """
    try:
        config = config_of(about)
    except (TypeError, ValueError) as error:
        if isinstance(error, PacelineError):
            raise
        raise CheckpointError(
            f"{file}: the description of its model is damaged ({error}); give another file."
        ) from error
    return replace(config, model=replace(config.model, load_model_path="", compile=False))
