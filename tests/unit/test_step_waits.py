"""A step of a world of one leaves the host free: it asks the device for nothing.

On the device `meta`, which has no values, a question raises; on a CPU it has an answer, and is
recorded. What a step's summary needs, one class copies; here it counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline.comm.host_copy import HostCopy
from paceline.comm.peer_activities import NO_PEERS, WaitLimit
from paceline.generation import summaries
from paceline.session.command_trainer import build_trainer
from paceline.session.sources import open_sources
from tests.harness.processes.sessions import session_of
from tests.harness.processes.worlds import run_of
from tests.unit.test_wiring import config_of

STEPS = 4
# Calls that ask the device, or copy from or to pageable memory.
ASKING = (
    *("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"),
    *("new_tensor", "tensor", "as_tensor"),
)


class Calls(TorchFunctionMode):
    """Records the calls that make the host wait, which a dispatcher doesn't see on a CPU."""

    def __init__(self, found: list[str]) -> None:
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assigned = name == "__setitem__" and not isinstance(args[2], Tensor)
        if name in ASKING or assigned:
            self._found.append(name)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Records reads of a value, and copies between two devices."""

    def __init__(self, found: list[str]) -> None:
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_fused_sgd_" and args[0][0].is_meta:  # torch has no kernel
            return None
        result = func(*args, **(kwargs or {}))
        devices = {one.device for one in (*args, result) if isinstance(one, Tensor)}
        copies = name in ("_to_copy", "copy_", "_copy_from") and len(devices) > 1
        if name == "_local_scalar_dense" or copies:
            self._found.append(name)
        return result


class Waits:
    """Waits of the steps inside `watched`, and the copies that the one class makes meanwhile."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.copies = self.reads = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        with Calls(self.found), Operations(self.found):
            yield

    def copy(self, tensor: Tensor) -> CountedCopy:
        self.copies += 1
        return CountedCopy(self, tensor)


class CountedCopy:
    """Twin of `HostCopy`, whose reads aren't waits."""

    def __init__(self, waits: Waits, tensor: Tensor) -> None:
        self._waits, self._size = waits, tensor.numel()

    def values(self, limit: WaitLimit) -> list[float]:
        self._waits.reads += 1
        return [1.0] * self._size


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits = Waits()
    monkeypatch.setattr(summaries, "HostCopy", waits.copy)
    return waits


class Net(nn.Module):
    """Net with running statistics, a table of rows, and a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(self.table(x))
        return logits


def library_steps(device: torch.device, folder: Path, waits: Waits) -> None:
    """Make steps in a script's loop, one of which accumulates, and one of which clips."""
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with paceline.join(snapshots=False) as world:
        paceline.parallelize(
            model, optimizer, world, sync_bn=device.type == "cpu"
        )  # meta: no kernel
        x, y = (torch.zeros(6, dtype=torch.int64, device=device) for _ in range(2))
        with waits.watched():
            for step in range(STEPS):
                with world.step(samples=6):
                    if step == 1:
                        with world.no_sync():
                            nn.functional.cross_entropy(model(x), y).backward()
                    nn.functional.cross_entropy(model(x), y).backward()
                    if step == 2:
                        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()


def steps_of_two_models(device: torch.device, folder: Path, waits: Waits) -> None:
    """Make steps of two models, each with an optimizer, in a script's loop."""
    models = [Net().to(device) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with paceline.join(snapshots=False) as world:
        for model, optimizer in zip(models, optimizers, strict=True):
            paceline.parallelize(model, optimizer, world)
        x = torch.zeros(6, dtype=torch.int64, device=device)
        with waits.watched():
            for _ in range(STEPS):
                with world.step():
                    for model, optimizer in zip(models, optimizers, strict=True):
                        sum(one(x).square().mean() for one in models).backward()
                        optimizer.step()
                        model.zero_grad()


def command_steps(device: torch.device, folder: Path, waits: Waits) -> None:
    """Make steps in the command's loop."""
    dtype = "bfloat16" if device.type == "cpu" else "float"  # meta: no autocast
    words = ("--no_snapshots", "--clip_norm", "1", "--decode_workers", "0")
    words = (*words, "--dtype", dtype, "--force_bfloat16")
    config = config_of(*words)
    sources, run = open_sources(config), run_of(device=device)
    with ExitStack() as resources:
        session = session_of(config, run, folder, resources)
        session.open_bindings()
        trainer = build_trainer(config, session, sources)
        for step in range(STEPS):
            batch = trainer.train.batch(0, step)
            with waits.watched():
                trainer._train_step(batch)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("make_steps", [library_steps, steps_of_two_models, command_steps])
def test_no_step_of_a_world_of_one_waits_for_its_device(
    make_steps: Callable[[torch.device, Path, Waits], None],
    device: str,
    waits: Waits,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    chosen = torch.device(device)
    module = sys.modules[paceline.join.__module__]  # the package shows the function by its name
    monkeypatch.setattr(module, "_device", lambda given, group: chosen)
    enabled = torch.is_autocast_enabled  # which doesn't know the device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind != "meta" and enabled(kind))
    make_steps(chosen, tmp_path, waits)
    assert waits.found == []
    assert waits.copies == STEPS
    assert waits.reads >= STEPS - 2


def test_the_one_class_copies_what_may_be_written_at_once() -> None:
    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    copy = HostCopy(values)
    values.zero_()
    assert copy.values(WaitLimit(1.0, NO_PEERS, "the values")) == [1.0, 2.0]
