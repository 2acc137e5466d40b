"""A rank of `memory.py`: trains a few steps, and says what its process holds, and for what.

A thread reads the process's proportional set size (PSS: what processes share is counted once, an
equal part for each) while the steps run. What each owner holds is read from the objects themselves,
once a step's gradients are there: the storages of their tensors, and the pages of windows.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.update.state_watch import plain_state

OWNERS = (
    *("weights", "gradients", "optimizer", "staging", "residuals", "snapshots", "backups"),
    "windows",
)
METHODS: Mapping[str, dict[str, str]] = {
    "allreduce": {"sync": "allreduce"},
    "notified": {"sync": "notified"},
    "sharded": {"sync": "notified", "update": "sharded"},
    "bf16": {"sync": "notified", "update": "sharded", "param_dtype": "bfloat16"},
}
WIDTH = 1024  # of a layer: 4 MiB of weights
SAMPLE_S = 0.003  # between two looks at the memory
_WINDOW = "/memfd:paceline window"


class Peak:
    """Thread that looks at this process's memory until it is stopped; `bytes` is the most."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the looks."""
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.bytes = max(self.bytes, proportional_bytes())


def proportional_bytes() -> int:
    """Return this process's proportional set size, bytes."""
    return _pss(Path("/proc/self/smaps_rollup").read_text())


def settled_bytes() -> int:
    """Return the same, once what was freed is the system's again."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return proportional_bytes()


def window_bytes(smaps: str) -> int:
    """Return the bytes of windows, of all ranks, for which this process counts in /proc/*/smaps."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)
    return sum(_pss(one) for one in mappings if _WINDOW in one.partition("\n")[0])


def _pss(text: str) -> int:
    return 1024 * sum(int(kib) for kib in re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE))


def model_of(mb: float) -> nn.Sequential:
    """Make a model of flat layers: weights of some megabytes, and next to no activations."""
    layers = max(1, round(mb * 1e6 / (4 * WIDTH**2)))
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of all rows."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def owners(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes that each owner holds; a storage counts for the first that has it.

    Gradients that moved into a window count as the window's.
    """
    found: dict[str, list[Any]] = {owner: [] for owner in OWNERS}
    found["weights"] = [*model.parameters(), *model.buffers()]
    with torch._C.DisableTorchFunctionSubclass():  # not a script's use, which makes them the mean
        found["gradients"] = [p.grad for p in model.parameters()]
        found["optimizer"] = [dict(plain_state(optimizer))]
    for one in gc.get_objects():
        owner = _ATTRIBUTES.get(type(one).__name__)
        if owner is not None and type(one).__module__.startswith("paceline."):
            found[owner[0]] += [vars(one).get(name) for name in owner[1]]
    smaps = Path("/proc/self/smaps").read_text()
    lines = [line for line in smaps.splitlines() if _WINDOW in line]
    ends = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in lines]
    windows = [range(start, stop) for start, stop in ends]
    seen: set[int] = set()
    sizes = {owner: sum(_sizes(held, seen, windows)) for owner, held in found.items()}
    sizes["windows"] = window_bytes(smaps)
    return sizes


# The objects of Paceline that hold memory, by the names of their classes: the owner's name, and
# the attributes that refer to the memory.
_ATTRIBUTES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Collectives": ("staging", ("_flat",)),
    "GradientViews": ("staging", ("_copies",)),
    "OwnedShards": ("optimizer", ("state", "fragments")),
    "ErrorFeedback": ("residuals", ("data", "_residual", "_next_residual")),
    "SnapshotStore": ("snapshots", ("_snapshots", "_spare")),
    "SnapshotBackup": ("backups", ("_copies",)),
}


def _sizes(held: Any, seen: set[int], windows: Sequence[range]) -> Iterator[int]:
    """Yield the sizes of all storages and bytes in a tree that weren't seen, nor are in windows."""
    for one in _leaves(held):
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            key = storage.data_ptr()
            size = storage.nbytes()
        else:
            key = id(one)
            size = len(one)
        if key and key not in seen and not any(key in window for window in windows):
            seen.add(key)
            yield size


def _leaves(tree: Any) -> Iterator[Tensor | bytes | bytearray | memoryview]:
    if isinstance(tree, Tensor):
        local = tree.to_local() if hasattr(tree, "to_local") else tree  # a DTensor, of FSDP2
        if local.layout is torch.strided:
            yield local.detach()
    elif isinstance(tree, bytes | bytearray | memoryview):
        yield tree
    elif isinstance(tree, Mapping):
        for value in [*tree.values(), *tree.keys()]:
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)
    elif type(tree).__name__ in ("_Snapshot", "Fragment"):
        yield from _leaves(list(vars(tree).values()))


def warm_up() -> None:
    """Load what a first step loads, so that it isn't taken for the model's memory."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = optimizer_of(model)
    for narrow in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = model(torch.ones(2, 4)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def warm_up_kernels() -> None:
    """Load Paceline's compiled kernels, and their compiler, for the same reason."""
    from paceline.codecs.kernels.compiled import add_up

    values = torch.ones(256)
    for count, past_caches in itertools.product((1, 2, 4), (False, True)):
        parts = [[(0, 256, values)]] * count
        add_up(parts, [0.5] * count, torch.empty(256), past_caches=past_caches)


def with_paceline(row: str, setting: Mapping[str, Any]) -> None:
    """Train by Paceline; `row` is a method, and what becomes of snapshots."""
    import paceline

    method, _, snapshots = row.partition(" ")
    copies = "divided" if snapshots == "divided" else "whole"
    world = paceline.join(
        seed=0,
        first_iter_timeout=300,
        snapshots=snapshots != "without",
        snapshot_copies=copies,
    )
    warm_up()
    warm_up_kernels()
    before = settled_bytes()
    peak = Peak()
    torch.manual_seed(0)
    model = model_of(setting["mb"])
    optimizer = optimizer_of(model)
    paceline.parallelize(model, optimizer, world, **METHODS[method])
    held: dict[str, int] = {}
    for number in range(setting["steps"] + 1):
        if number == setting["steps"]:
            world.settle()
            peak.stop()  # what looks at all objects takes memory, too
        with world.step():
            with torch.autocast("cpu", torch.bfloat16, enabled=method == "bf16"):
                loss = model(torch.ones(2, WIDTH)).mean()
            loss.backward()
            if number == setting["steps"]:
                held = owners(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    world.settle()
    write(setting, world.rank, peak, before, held)
    world.close()


def with_torch(row: str, setting: Mapping[str, Any]) -> None:
    """Train by DistributedDataParallel, or by FSDP2."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo")
    warm_up()
    distributed.all_reduce(torch.ones(1))
    before = settled_bytes()
    peak = Peak()
    torch.manual_seed(0)
    model = model_of(setting["mb"])
    trained: nn.Module = model
    if row == "fsdp2":
        mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optimizer_of(trained)
    held: dict[str, int] = {}
    for number in range(setting["steps"] + 1):
        if number == setting["steps"]:
            peak.stop()
        trained(torch.ones(2, WIDTH)).mean().backward()
        if number == setting["steps"]:
            held = owners(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    write(setting, distributed.get_rank(), peak, before, held)
    distributed.barrier()
    distributed.destroy_process_group()


def write(
    setting: Mapping[str, Any], rank: int, peak: Peak, before: int, held: Mapping[str, int]
) -> None:
    """Write what a rank found, as multiples of the weights in float32."""
    weights = sum(p.numel() * 4 for p in model_of(setting["mb"]).to("meta").parameters())
    found = {"peak": peak.bytes - before, **held}
    multiples = {name: round(size / weights, 4) for name, size in found.items()}
    Path(setting["results"], f"{rank}.json").write_text(json.dumps(multiples))


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = json.loads(sys.argv[2])
    (with_torch if sys.argv[1] in ("ddp", "fsdp2") else with_paceline)(sys.argv[1], given)
