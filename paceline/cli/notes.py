"""Notes before a run starts: choices that the program made, and flags without effect."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config.train import TrainConfig


def notes(config: TrainConfig, gpus: int, launcher: str = "") -> Iterator[str]:
    """Yield a sentence for each note.

    Args:
        config: the flags.
        gpus: the number of GPUs on this machine.
        launcher: of the workers, unless it is Paceline's supervisor.
    """
    world = config.world
    workers = config.world.workers
    replicas = max(1, workers // config.pipeline.stages)
    asked = world.gpus or world.num_gpus
    if asked and not gpus and not world.use_cpu:
        plural = "s" if workers > 1 else ""
        yield f"torch finds no usable GPU here: starting {workers} CPU worker{plural} instead."
    batch = config.optim.batch_size
    if batch % replicas:
        small, more = divmod(batch, replicas)
        divide = "workers" if config.pipeline.stages == 1 else "replicas"
        yield (
            f"--batch_size {batch} is not divisible by {replicas} {divide}: {more} of them "
            f"process {small + 1} image{'s' if small else ''} per step and the others {small}."
        )
    served = config.average.average_through == "server"  # which is reached by TCP
    if world.num_shards == 1 and not launcher and not served:
        yield from map(str, config.sync.idle_on_one_machine)
    if launcher == "torchrun":
        for flag in ("file_store_path", "redis_host", "redis_url", "etcd"):
            if getattr(world, flag):
                yield f"--{flag} is ignored: rendezvous uses torchrun's own store."
    if world.file_store_path and (world.redis_host or world.redis_url):
        yield (
            f"--file_store_path {world.file_store_path} isn't used: the rendezvous is through "
            "Redis, and models are saved below --output_dir."
        )
    for flag in config.legacy.given:
        yield f"--{flag} is deprecated and has no effect."
