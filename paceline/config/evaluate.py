"""Configuration of `paceline evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from paceline.config.data import MAX_DECODE_WORKERS
from paceline.config.rules import at_least, within
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Options of `paceline evaluate`."""

    run: Positional[Annotated[str, arg(metavar="RUN")]]
    """Folder or id of a run of `paceline train`, or a file of
    weights that such a run has written."""

    test_data: str = ""
    """Path of the database, of the kind that the run's were. By
    default the run's test data."""

    output_dir: str = "runs"
    """Folder of all runs."""

    weights: str = ""
    """best: those after the run's best epoch. last: after its last
    one. Or a file of weights. By default the best ones, if the run
    has test data."""

    run_workers: int | None = None
    """Workers among which a batch is divided, as in the run's own
    evaluations. None: as many as the run had."""

    decode_workers: int | None = None
    """Decode processes, beside this one. None: as many as there
    are cores to spare."""

    use_cpu: bool = False
    """Compute on the CPU even if there is a GPU."""

    confusion: bool = False
    """Print how many images of each class were taken for which."""

    confusion_png: str = ""
    """Draw these counts as a picture: NAME.png."""

    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        if self.confusion_png and not self.confusion_png.lower().endswith(".png"):
            raise ConfigError(
                flag="confusion_png",
                value=self.confusion_png,
                rule="must end in .png",
                remedy="give a name such as confusion.png",
            )
        if self.run_workers is not None:
            at_least(self, 1, "run_workers")
        if self.decode_workers is not None:
            within("decode_workers", self.decode_workers, 0, MAX_DECODE_WORKERS + 1)
