"""The library's public surface: names and arguments. A change here breaks somebody's script."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import paceline
from paceline import World
from tests.harness.processes.worlds import run_of, world_of

NAMES = [
    *("CheckpointError", "CommError", "CommTimeout", "ConfigError", "DataError", "Loader"),
    *("PacelineError", "PeerLost", "ReplicasDiffer", "World"),
    *("deferred_init", "join", "launch", "loader", "parallelize", "stages"),
    "tensor_parallel",
    *("Average", "BMUF", "DiLoCo", "EASGD", "Mean", "OuterRule", "Server", "SparseLoCo"),
]
SIGNATURES = {
    "join": "(run=None, *, resume='auto', reset_optimizer=False, checkpoint_steps=0, "
    "checkpoint_minutes=5.0, "
    "keep_checkpoints=2, snapshots=True, snapshot_memory_mb=0.0, snapshot_copies='auto', "
    "replica_check=True, trace_steps='', tracker='', seed=0, device=None, "
    "first_iter_timeout=None, timeout=None, "
    "peer_timeout=10.0, idle_timeout=None, default_group=False, mesh=None)",
    "parallelize": "(model, optimizer, world, *, sync='auto', wire='fp32', "
    "update='replicated', param_dtype='float32', transport='tcp', connections=0, bucket_mb=0.0, "
    "shares='auto', sync_bn=False, buffers='broadcast')",
    "stages": "(model, world, *, loss, microbatches, cuts=None, schedule='1f1b', "
    "blocks=None, example=None, checkpoint_activations=False)",
    "deferred_init": "()",
    "tensor_parallel": "(model, world, plan=None)",
    "loader": "(dataset, batch_size, world, *, train=True, shuffle=None, seed=None, "
    "drop_last=False, num_workers=0, collate_fn=None, pin_memory=False, "
    "uneven='join', sampler=None, weights=None, batch_sampler=None)",
    "launch": "(function, *arguments, workers=None)",
    "World.step": "(self, samples=None, *, weight=None)",
    "World.no_sync": "(self)",
    "World.reduce": "(self)",
    "World.settle": "(self)",
    "World.coordinate": "(self, axis)",
    "World.merge": "(self)",
    "World.total": "(self, tensor)",
    "World.evaluation": "(self, loader)",
    "World.meter": "(self, *names)",
    "World.track": "(self, *objects, **named)",
    "World.log": "(self, **values)",
    "World.checkpoint": "(self)",
    "World.close": "(self)",
}
PROPERTIES = {
    "World": {
        *("rank", "world_size", "local_rank", "local_world_size", "device", "generation"),
        *("epoch", "steps", "staleness", "mesh"),
    },
    "Loader": {"epoch", "step", "steps", "count", "samples"},
}


def test_the_public_names_are_these() -> None:
    assert sorted(paceline.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(paceline))


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_is_this(name: str) -> None:
    function: object = paceline
    for part in name.split("."):
        function = getattr(function, part)
    assert callable(function)
    signature = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    shown = signature.replace(parameters=plain, return_annotation=signature.empty)
    assert str(shown) == SIGNATURES[name]


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_class_shows_no_more_than_this(name: str) -> None:
    kind = getattr(paceline, name)
    shown = {member for member in dir(kind) if not member.startswith("_")}
    methods = {path.partition(".")[2] for path in SIGNATURES if path.startswith(f"{name}.")}
    assert shown == PROPERTIES[name] | methods


def test_every_public_name_says_what_it_is() -> None:
    for name in NAMES:
        assert inspect.getdoc(getattr(paceline, name))


def test_importing_the_package_does_not_wait_for_torch() -> None:
    look = "import paceline, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", look], check=True)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'jion'"):
        _ = paceline.jion


def test_a_world_names_its_rank_among_all_and_on_its_machine() -> None:
    world = World.__new__(World)
    world._run = run_of(group=world_of((2, 3), 4))
    assert (world.rank, world.world_size) == (4, 5)
    assert (world.local_rank, world.local_world_size) == (2, 3)
