"""Trained model of a run, as its folder describes it: weights, form of the images, class names.

runs/digits/config.toml         model, number of classes, size and normalisation of the images
runs/digits/resnet20_best.pt    the weights; resnet20_model.pt are those of the last epoch
runs/digits/labels.txt          the names of the classes, if the database had them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from paceline.config.train import TrainConfig, config_of
from paceline.data.db.index.database_index import read_label_names
from paceline.errors import ConfigError, Message
from paceline.models.output_check import check_output, explained_errors
from paceline.run.precision import Precision
from paceline.state.run_folder import CONFIG_NAME, read_configuration
from paceline.state.weights import load_weights, weights_files
from paceline.wiring.model import make_model


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """Trained model, which classifies images.

    Attributes:
        config: the run's configuration.
        weights: the file of the weights.
        names: the names of the classes, label 0 first; where they aren't known, the labels.
        named: whether they are known.
        model: the module, on its device.
        device: where it computes.
    """

    config: TrainConfig
    weights: Path
    names: Sequence[str]
    named: bool
    model: nn.Module
    device: torch.device

    @classmethod
    def of_run(cls, folder: Path, device: torch.device, weights: str = "") -> Self:
        """Read the trained model of a run.

        Args:
            folder: the run's.
            device: where it is to compute.
            weights: "best" or "last", or the path of a file; "": the best ones if there are some.

        Raises:
            ConfigError: the run was made by another program than `paceline train`, has no weights
                yet, or the file is another model's.
            CheckpointError: the file is damaged.
        """
        flags = read_configuration(folder)
        if not flags:
            raise ConfigError(
                f"{folder} has no {CONFIG_NAME}: it is the run of a script, whose model only that "
                "script knows; load a file of its checkpoints by torch.load()."
            )
        config = config_of(flags)
        file = _weights_of(folder, config, weights)
        config = replace(config, model=replace(config.model, load_model_path="", compile=False))
        known = read_label_names(folder)
        names = known or tuple(map(str, range(config.data.num_labels)))
        model = make_model(config, device).eval()
        load_weights(file, model, flag="weights", whole=True)
        return cls(
            config=config,
            weights=file,
            names=names,
            named=known is not None,
            model=model,
            device=device,
        )

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Return the logits of images, (n, num_labels), in the precision of the training.

        Args:
            images: normalised, (n, channels, image_size, image_size), on the device.

        Raises:
            ConfigError: the model fails, or returns something else.
        """
        with Precision(self.config.model.dtype, self.device).forward(), explained_errors(images):
            return check_output(self.model(images), self.config.data.num_labels, len(images))


def _weights_of(folder: Path, config: TrainConfig, weights: str) -> Path:
    """Return the file that has the weights.

    Raises:
        ConfigError: there is none.
    """
    last, best = weights_files(folder, config.model.weights_name)
    if weights not in ("", "best", "last"):
        return Path(weights)
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
