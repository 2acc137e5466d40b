"""A worker's job: everything from its place in the world to the end of the training."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from paceline import build
from paceline.cluster.members import Members
from paceline.config.train import TrainConfig


def train(config: TrainConfig, members: Members, store: Store) -> None:
    """Train as one worker of the world, to the end.

    Raises:
        PacelineError: something that the run can't go on without failed.
    """
    folder = Path(config.output.output_dir, config.world.run_id)
    device = build.device_of(config, members.local_rank)
    torch.set_num_threads(build.cores_per_worker(members.local_world_size))
    with ExitStack() as stack:
        sources = build.open_sources(config)
        stack.callback(sources.close)
        recorder, log = build.build_recorder(config, members, folder)
        stack.callback(recorder.close)
        communicator = build.connect(config, members, store, device)
        stack.callback(communicator.close)
        trainer = build.build_trainer(
            config, members, communicator, sources, device, recorder, folder
        )
        stack.callback(trainer.replica.close)
        for loader in (trainer.train, trainer.test):
            if loader is not None:
                stack.callback(loader.close)
        recorder.event(
            "run",
            model=config.model.name,
            world_size=members.world_size,
            machines=len(members.machines),
            device=device.type,
            samples=trainer.train.samples,
            steps=trainer.train.steps,
            epochs=trainer.epochs,
            log=log,
        )
        trainer.run()
        recorder.event("end")
