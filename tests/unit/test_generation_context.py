"""A generation's context opens its connections by purpose, and ends or aborts all of them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from paceline.cluster.membership.generation import Group
from paceline.comm.communicator import Communicator, gather_bytes
from paceline.comm.single_rank import SingleRankCommunicator
from paceline.errors import CommTimeout
from paceline.generation.context import GenerationContext, WindowSpec
from paceline.generation.mesh import Mesh
from paceline.generation.run import Run
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.membership.given_membership import GivenConnector
from tests.harness.processes.worlds import open_context, world_of


class Recorded(SingleRankCommunicator):
    """Communicator of one rank that notes its end."""

    def __init__(self, purpose: str, notes: list[str]) -> None:
        self._purpose, self._notes = purpose, notes

    def close(self) -> None:
        self._notes.append(f"close {self._purpose}")

    def abort(self) -> None:
        self._notes.append(f"abort {self._purpose}")


def context_of(notes: list[str], group: Group | None = None) -> GenerationContext:
    def connect(group: Group, purpose: str) -> Recorded:
        return Recorded(purpose, notes)

    cpu = torch.device("cpu")
    context = open_context(group or world_of(), connect, device=cpu, limits=(5.0, 5.0))
    context.group("data", "layers")
    return context


def test_connections_end_in_reverse_order_and_once() -> None:
    notes: list[str] = []
    context = context_of(notes)
    context.close()
    context.close()
    assert notes == ["close layers", "close steps"]


def test_connections_are_aborted_where_their_use_fails() -> None:
    notes: list[str] = []
    with pytest.raises(ZeroDivisionError), context_of(notes):
        _ = 1 / 0
    assert notes == ["abort layers", "abort steps"]


def test_ranks_of_a_line_are_connected_once_a_purpose() -> None:
    opened: list[tuple[str, tuple[int, ...], int]] = []

    def connect(group: Group, purpose: str) -> Recorded:
        opened.append((purpose, group.ranks, group.rank))
        return Recorded(purpose, [])

    cpu, world = torch.device("cpu"), world_of((2, 2), rank=2)
    mesh = Mesh(machines=(0, 0, 1, 1), axes=(("stage", 2), ("data", 2)))
    with open_context(world, connect, device=cpu, limits=(5.0, 5.0), mesh=mesh) as context:
        for _ in range(2):
            for axis in ("all", "stage", "data", "machine"):
                context.group(axis, "layers/1")
        assert context.group("data", "gradients/1") is context.group("data", "steps/1")
        assert context.group("data", "steps/1") is not context.group("data", "steps")
        assert context.summaries.communicator is context.group("all", "steps")
        assert context.group("data", "steps") is not context.group("all", "steps")
    assert opened[:4] == [
        ("steps", (0, 1, 2, 3), 2),
        ("layers/1", (0, 1, 2, 3), 2),
        ("stage/0/layers/1", (0, 2), 1),
        ("data/2/layers/1", (2, 3), 0),
    ]
    assert [purpose for purpose, *_ in opened[4:]] == ["data/2/steps/1", "data/2/steps"]


def test_where_each_rank_has_the_whole_model_summaries_take_no_connection_of_their_own() -> None:
    with context_of([], world_of((2, 1), rank=1)) as context:
        assert context.along("data").ranks == context.along("all").ranks == (0, 1, 2)
        assert context.along("machine").ranks == (0, 1)
        assert context.group("data", "steps") is context.group("all", "steps")
        assert context.group("data", "buffers") is context.summaries.communicator


class Closed:
    """Counts its ends."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_what_is_kept_last_for_each_purpose_closes_with_the_context() -> None:
    first, second, other = Closed(), Closed(), Closed()
    with context_of([]) as context:
        context.keep("synchronizer", first)
        context.keep("synchronizer/1", other)
        context.keep("synchronizer", second)
    assert (first.closed, second.closed, other.closed) == (0, 1, 1)


def test_the_first_window_waits_as_long_as_a_start_may_take_and_later_ones_less() -> None:
    def on_rank(communicator: Communicator) -> list[str]:
        cpu, errors = torch.device("cpu"), []
        group = world_of((1, 1), communicator.rank)
        context = open_context(group, lambda *_: communicator, device=cpu, limits=(0.2, 0.1))
        for _ in range(3):
            if communicator.rank == 1:  # publishes its addresses, and never connects
                for _ in ("inside the machine", "between machines"):
                    gather_bytes(communicator, b"", "the addresses of windows")
                continue
            with pytest.raises(CommTimeout) as error:
                context.window("a test", WindowSpec(), 8, 1)
            errors.append(str(error.value))
        return errors

    errors, _ = run_ranks(2, on_rank)
    assert [re.findall(r"[\d.]+ s\b", error) for error in errors] == [
        ["0.2 s"],
        ["0.1 s"],
        ["0.1 s"],
    ]


def test_an_object_that_keeps_the_run_finds_the_next_context_there() -> None:
    notes: list[str] = []
    run = Run(context=context_of(notes), connector=GivenConnector(partial(context_of, notes)))
    for purpose in ("rows", "layers", "rows"):
        run.open("data", purpose)
    layers, asked = run.context.group("data", "layers"), run.rank_and_size
    run.enter(world_of((1, 2), 0, token="another", number=1))
    assert asked() == (0, 3)
    assert run.context.group("data", "layers") is not layers
    assert notes == ["abort rows", "abort layers", "abort steps"]
    with run:
        pass
    assert notes[3:] == ["close rows", "close layers", "close steps"]


def test_the_first_generation_is_numbered_without_another_connection() -> None:
    notes: list[str] = []
    run = Run(context=context_of(notes))
    communicator, unnumbered = run.context.group("data", "steps"), run.context.world
    run.start_at(7)
    assert run.context.along("data").generation.number == 7
    assert run.context.world == replace(
        unnumbered, generation=replace(unnumbered.generation, number=7)
    )
    assert run.context.group("data", "steps") is communicator
    assert notes == []


@pytest.mark.parametrize(("token", "number"), [("token", 3), ("another", 2), ("another", 1)])
def test_a_later_generation_without_a_number_and_a_token_of_its_own_is_a_bug(
    token: str, number: int
) -> None:
    run = Run(
        context=context_of([], world_of(number=2)),
        connector=GivenConnector(partial(context_of, [])),
    )
    with pytest.raises(AssertionError):
        run.enter(world_of(token=token, number=number))


class Interruptible(SingleRankCommunicator):
    """Communicator of one rank that notes that it was interrupted."""

    def __init__(self, notes: list[str], purpose: str = "interrupted") -> None:
        self._notes, self._purpose = notes, purpose

    def interrupt(self) -> None:
        self._notes.append(self._purpose)


@pytest.mark.parametrize("ended_by", ["a step", "a loss in this replica"])
def test_between_steps_waits_inside_a_replica_outlast_the_loss_of_another_one(
    ended_by: str,
) -> None:
    notes: list[str] = []

    def connect(group: Group, purpose: str) -> Interruptible:
        return Interruptible(notes, purpose)

    cpu, world = torch.device("cpu"), world_of((4,), rank=2)
    mesh = Mesh(machines=(0, 0, 0, 0), axes=(("stage", 2), ("data", 2)))
    context = open_context(world, connect, device=cpu, limits=(5.0, 5.0), mesh=mesh)
    for axis in ("stage", "data"):
        context.group(axis, "layers")
    context.spares = True
    context.interrupt()
    assert notes == ["steps", "data/2/layers"]
    context.group("stage", "rows")  # opens between steps, too
    assert len(notes) == 2
    if ended_by == "a step":
        context.spares = False
    else:
        context.interrupt(broken=True)
    assert notes[2:] == ["stage/0/layers", "stage/0/rows"]
    context.interrupt()
    assert len(notes) == 4


def test_a_replica_that_is_the_only_one_ends_all_waits_at_once() -> None:
    notes: list[str] = []
    cpu, world = torch.device("cpu"), world_of((2,), rank=1)
    mesh = Mesh(machines=(0, 0), axes=(("stage", 2), ("data", 1)))
    context = open_context(
        world, lambda *_: Interruptible(notes), device=cpu, limits=(5.0, 5.0), mesh=mesh
    )
    context.group("stage", "layers")
    context.spares = True
    context.interrupt()
    assert notes == ["interrupted"] * 2


def test_what_opens_after_an_interrupt_is_interrupted_too() -> None:
    notes: list[str] = []
    cpu = torch.device("cpu")
    context = open_context(
        world_of(), lambda group, purpose: Interruptible(notes), device=cpu, limits=(5.0, 5.0)
    )
    context.interrupt()
    assert notes == ["interrupted"]
    context.group("data", "layers")
    assert notes == ["interrupted"] * 2
    names = [context.next_window("a test")]
    window = context.window("a test", WindowSpec(), 8, 1)
    names += [context.next_window("a test"), context.next_window("another")]
    assert len({*names}) == 3
    context.abort()
    context.interrupt()
    assert notes == ["interrupted"] * 2
    window.close()
