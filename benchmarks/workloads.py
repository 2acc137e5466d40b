"""What a model trains on in a benchmark: made-up batches in memory, and how large they are.

Images for the zoo's models, for a user's own (`package.module:function`) and for `vgg16`; words for
`lstm`, tokens for `gpt`. The loss is the cross entropy of each image's class or next token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from command_line import Options
from models import CLASSES, MODELS, VOCABULARY
from torch import Tensor, nn
from torch.nn import functional

from paceline.models.zoo import build_model

WORK = ("model", "image_size", "batch", "dtype")
"""What ranks are told of the work: fields of `variants.Setting`, and the options' names."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model's work.

    Attributes:
        build: makes the model, with new weights by torch's seed.
        batch: samples a rank by default.
        image_size: pixels by default, 0 of text.
        smallest: the least image that the model takes, in pixels.
        length: tokens of a sequence, 0 of images.
        classes: of an image, or words of the vocabulary.
    """

    build: Callable[[], nn.Module]
    batch: int = 16
    image_size: int = 0
    smallest: int = 1
    length: int = 0
    classes: int = CLASSES

    def samples(self, batch: int, image_size: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets by torch's seed.

        Images are (batch, 3, image_size, image_size) of float in the channels-last layout, and have
        (batch,) targets. Text is (batch, length) of int64, and so are its targets.
        """
        if self.length:
            tokens = torch.randint(self.classes, (batch, self.length + 1))
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        images = torch.randn(batch, 3, image_size, image_size)
        labels = torch.randint(self.classes, (batch,))
        return images.contiguous(memory_format=torch.channels_last), labels

    def samples_in_words(self, batch: int, image_size: int) -> str:
        """Say what a rank's batch is."""
        if self.length:
            return f"{self.classes} words, {batch} sequences of {self.length} a rank"
        return f"{self.classes} classes, {image_size} x {image_size}, {batch} images a rank"


def workload_of(model: str) -> Workload:
    """Return what a model trains on."""
    if model == "lstm":
        return Workload(build=MODELS[model], batch=20, length=35, classes=VOCABULARY[model])
    if model == "gpt":
        return Workload(build=MODELS[model], batch=8, length=64, classes=VOCABULARY[model])
    if model == "vgg16":
        return Workload(build=MODELS[model], image_size=32, smallest=32)
    build = partial(build_model, model, num_labels=CLASSES, num_channels=3)
    return Workload(build=build, image_size=64)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy; logits are (..., classes), targets (...)."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def add_work(parser: Options) -> None:
    """Add the options that choose the work; `settled` gives those a value that have none."""
    parser.add("--model", default="resnet50", help=f"of the zoo, or {', '.join(MODELS)}")
    parser.add("--image-size", type=int, help="default: 64; of vgg16 32")
    parser.add(
        "--batch", type=int, help="images or sequences a rank; default: 16; of lstm 20, of gpt 8"
    )
    parser.add("--ranks", type=int, default=2)
    parser.add("--dtype", choices=["float", "bfloat16"], default="float")


def settled(parser: Options) -> argparse.Namespace:
    """Read the options of `add_work`; the model's own defaults where they aren't given."""
    options = parser.parse_args()
    workload = workload_of(options.model)
    if options.batch is None:
        options.batch = workload.batch
    if options.image_size is None:
        options.image_size = workload.image_size
    elif workload.length:
        parser.error(f"--image-size {options.image_size}: {options.model} reads text, no images")
    if options.image_size < workload.smallest and not workload.length:
        parser.error(
            f"--image-size {options.image_size}: {options.model} takes {workload.smallest} or more"
        )
    return options


def title_of(options: argparse.Namespace) -> str:
    """Say what the work is."""
    samples = workload_of(options.model).samples_in_words(options.batch, options.image_size)
    return f"{options.model}, {samples}, {options.ranks} ranks, {options.dtype}"


def work_of(options: argparse.Namespace) -> dict[str, object]:
    """Return what ranks are told of the work, beside their rows."""
    return {name: getattr(options, name) for name in WORK}
