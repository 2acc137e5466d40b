"""Configuration of a pipeline of stages."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.plan import ScheduleName
from paceline.config.rules import at_least
from paceline.errors import ConfigError, many


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Stages of the model, which train a batch in microbatches."""

    stages: int = 1
    """Number of stages into which the model is divided, each on a worker of its own. They divide
    the number of all workers; the rest of it is replicas, which divide the batch. Stages are on
    machines of their own where there are as many."""

    microbatches: int = 0
    """Number of parts into which each replica's share of the batch is cut, at least that of the
    stages. BatchNorm's statistics are those of each part. 0: four for each stage; with one stage,
    the share isn't cut."""

    cuts: str = ""
    """Blocks of the model at which the stages but the first begin, separated by commas, such as
    layer3 or layer2.1,layer4. By default they are chosen by measured time, and reported; a run that
    resumes keeps them."""

    schedule: ScheduleName = "1f1b"
    """Order in which the stages run their microbatches; `paceline plan` draws them. gpipe: all
    forward passes first. 1f1b: keeps the activations of fewer microbatches. zb-h1: divides backward
    passes, to wait less."""

    checkpoint_activations: bool = False
    """Keep only the inputs of each stage, and compute the other activations again in backward."""

    tensor: int = 1
    """Number of workers that divide each layer. Only the value 1 is supported: the command's models
    have no plan for it. paceline.tensor_parallel() divides layers in a script."""

    def __post_init__(self) -> None:
        at_least(self, 1, "stages", "tensor")
        at_least(self, 0, "microbatches")
        if self.tensor > 1:
            raise ConfigError(
                flag="tensor",
                value=self.tensor,
                rule="the models of this command are image classifiers, for which there is no plan "
                "that divides their layers",
                remedy="use --stages, or call paceline.tensor_parallel(model, world, plan) in a "
                "script that paceline launch starts",
            )
        cuts = len(self.cut_names)
        if self.cuts and cuts != self.stages - 1:
            raise ConfigError(
                flag="cuts",
                value=self.cuts,
                rule=f"names {many(cuts, 'block')}, but {many(self.stages, 'stage')} begin at "
                f"{self.stages - 1} besides the first",
                remedy="name a block for each stage but the first, or leave out --cuts",
            )

    @property
    def active(self) -> bool:
        """Whether batches are trained in microbatches, by a pipeline of one or more stages."""
        return self.stages > 1 or self.microbatches > 0 or self.checkpoint_activations

    @property
    def microbatch_count(self) -> int:
        """Number of microbatches of a batch."""
        return self.microbatches or (4 * self.stages if self.stages > 1 else 1)

    @property
    def cut_names(self) -> list[str]:
        """The names in `--cuts`."""
        return [name.strip() for name in self.cuts.split(",")] if self.cuts else []
