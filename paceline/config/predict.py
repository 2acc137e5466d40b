"""Configuration of `paceline predict`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from paceline.config.data import MAX_DECODE_WORKERS
from paceline.config.rules import at_least, within
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Options of `paceline predict`."""

    run: Positional[Annotated[str, arg(metavar="RUN")]]
    """Folder or id of a run of `paceline train`, or a file of
    weights that such a run has written."""

    images: Positional[Annotated[tuple[str, ...], arg(metavar="IMAGE|FOLDER|- …")]]
    """Image files, and folders with images at any depth. -: read
    their paths from standard input, one a line."""

    output_dir: str = "runs"
    """Folder of all runs."""

    weights: str = ""
    """best: those after the run's best epoch. last: after its last
    one. Or a file of weights. By default the best ones, if the run
    has test data."""

    top: int = 3
    """How many classes to show, the likeliest first."""

    batch_size: int = 64
    """Images that the model gets at once."""

    decode_workers: int | None = None
    """Decode processes, beside this one. None: as many as there
    are cores to spare."""

    use_cpu: bool = False
    """Compute on the CPU even if there is a GPU."""

    csv: bool = False
    """Print a table of comma-separated values."""

    json: bool = False
    """Print a JSON object a line, one for each image."""

    def __post_init__(self) -> None:
        if not self.images:
            raise ConfigError(
                "An image or a folder is required, as in paceline predict runs/my-run photos."
            )
        at_least(self, 1, "top", "batch_size")
        if self.decode_workers is not None:
            within("decode_workers", self.decode_workers, 0, MAX_DECODE_WORKERS + 1)
        if self.csv and self.json:
            raise ConfigError("--csv and --json are two forms of one output: give one of them.")
