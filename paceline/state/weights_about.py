"""Description of a model, in the file of its weights: `about`, an attribute of the state dict.

    state = torch.load("runs/digits/resnet20_best.pt", weights_only=True)
    model.load_state_dict(state)        # the file is a plain state dict
    state.about["classes"]              # ["ant", "bee", …]

torch keeps the attributes of a state dict: its own `_metadata` is one. A safetensors file has the
same entries as JSON in its metadata.

Entries are the flags of `paceline train` that a model is made, fed and scored by, under their
names, and these:

    paceline            the format's number
    model               the model's name, as --model takes it
    classes             the classes' names, label 0 first; not there: they aren't known
    evaluation          what becomes of an image: the short side is scaled to `resize` pixels, the
                        centre of `crop` × `crop` is cut out, `mean` is subtracted and the result
                        divided by `std`, on the 0 to 255 scale, in the channels' order `channels`
    workers, threads    of the run: slices of a batch, and threads that computed each of them
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.config.data import DataConfig
from paceline.config.model import ModelConfig
from paceline.config.train import TrainConfig
from paceline.errors import CheckpointError
from paceline.state.checkpoint_parts import INDEX_SUFFIX
from paceline.state.file_integrity import check_header, load_file

_FORMAT = 1
_OF_PARTS = frozenset(one.name for part in (DataConfig, ModelConfig) for one in fields(part))
_OF_SCORES = frozenset(("batch_size", "label_smoothing", "seed", "num_shards"))
# These are of this start, or of this machine.
_OF_START = frozenset(("load_model_path", "save_model_name", "freeze"))


def describe(config: TrainConfig, classes: Sequence[str] | None) -> dict[str, Any]:
    """Return the description of a run's model, of values that JSON knows.

    Args:
        config: the run's configuration.
        classes: the classes' names, label 0 first; None: they aren't known.
    """
    data = config.data
    names = (_OF_PARTS | _OF_SCORES) - _OF_START
    cuts = data.augment in ("caffe2", "inception")
    about = {
        **{name: value for name, value in config.identity().items() if name in names},
        "paceline": _FORMAT,
        "model": config.model.name,
        "evaluation": {
            "resize": data.scale if cuts else data.image_size,
            "crop": data.image_size,
            "mean": data.each_channel(data.image_mean_per_channel),
            "std": data.each_channel(data.image_std_per_channel),
            "channels": "RGB" if data.num_channels == 3 else "grey",
        },
    }
    if classes is not None:
        about["classes"] = classes
    plain: dict[str, Any] = json.loads(json.dumps(about))
    return plain


def read_description(path: Path) -> Mapping[str, Any] | None:
    """Return the description in a file of weights; None: it has none.

    Raises:
        CheckpointError: the file is damaged or isn't one of weights.
    """
    if path.suffix == INDEX_SUFFIX or (kind := check_header(path)) == "caffe2":
        return None
    found: object
    if kind == "safetensors":
        found = _of_safetensors(path)
    else:
        found = getattr(load_file(path, mmap=kind == "torch"), "about", None)
    if not isinstance(found, Mapping) or "paceline" not in found:
        return None
    if found["paceline"] != _FORMAT:
        raise CheckpointError(
            f"{path}: its description has the format {found['paceline']}, and this version of "
            f"Paceline knows {_FORMAT}: update Paceline."
        )
    return found


def _of_safetensors(path: Path) -> Mapping[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        texts = json.loads(file.read(length)).get("__metadata__", {})
    found = {}
    for name, text in texts.items():
        try:
            found[name] = json.loads(text)
        except ValueError:
            continue  # another program's
    return found
