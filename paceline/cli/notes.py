"""What a person should know before their run starts: choices that were made for them."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config.train import TrainConfig


def notes(config: TrainConfig, gpus: int, launcher: str = "") -> Iterator[str]:
    """Yield a sentence for each choice.

    Args:
        config: what was asked for.
        gpus: how many this machine has.
        launcher: who started the workers, if not a supervisor of ours.
    """
    world, workers = config.world, config.world.workers
    asked = world.gpus or world.num_gpus
    if asked and not gpus and not world.use_cpu:
        plural = "s" if workers > 1 else ""
        yield f"this machine has no GPU that torch can use: {workers} CPU worker{plural} instead."
    batch = config.optim.batch_size
    if batch % workers:
        small, more = divmod(batch, workers)
        yield (
            f"--batch_size {batch} doesn't divide by {workers} workers: {more} of them take "
            f"{small + 1} image{'s' if small else ''} a step and the others {small}."
        )
    if world.num_shards == 1 and not launcher:
        yield from config.sync.idle_on_one_machine
    if launcher == "torchrun":
        for flag in ("file_store_path", "redis_host", "redis_url"):
            if getattr(world, flag):
                yield f"--{flag} isn't used: torchrun's processes meet in its own store."
    if world.file_store_path and (world.redis_host or world.redis_url):
        yield (
            f"--file_store_path {world.file_store_path} isn't used: the rendezvous is through "
            "Redis, and models are saved below --output_dir."
        )
    for flag in config.legacy.given:
        yield f"--{flag} has no meaning any more and changes nothing."
