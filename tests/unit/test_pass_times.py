"""The passes of a step are timed without its waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.replica.read_tracing import ReadMap, registering_modules
from paceline.run.autotune.pass_times import PassTimes
from paceline.run.autotune.step_schedule import (
    Parameter,
    Profile,
    seconds_by_urgency,
    seconds_in_order,
)
from tests.harness.timelines import GivenTime

CPU = torch.device("cpu")


class Lasting(torch.autograd.Function):
    """Product by a weight that takes a second forward, and three backward before its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, clock: GivenTime) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.clock = clock
        clock.passes(1)
        return values * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        values, weight = ctx.saved_tensors
        ctx.clock.passes(3)
        return gradients[0] * weight, gradients[0] * values, None


class Layer(nn.Module):
    """A layer of so many values that takes a second forward, and three backward."""

    def __init__(self, clock: GivenTime, count: int) -> None:
        super().__init__()
        self.clock = clock
        self.weight = nn.Parameter(torch.ones(count))

    def forward(self, values: Tensor) -> Tensor:
        product: Tensor = Lasting.apply(values, self.weight[:1], self.clock)  # type: ignore[no-untyped-call]
        return product


@contextmanager
def timed(model: nn.Module, clock: GivenTime, **changes: Any) -> Iterator[PassTimes]:
    fields = {"readers": registering_modules(model), "outside": frozenset(), **changes}
    times = PassTimes(model, ReadMap(**fields), list(model.parameters()), frozenset(), clock)
    yield times
    times.close()


def train(
    model: nn.Module, clock: GivenTime, times: PassTimes, steps: int, data: float = 0.0
) -> None:
    for _ in range(steps):
        times.begin_step()
        clock.passes(data)
        model(torch.ones(1)).sum().backward()
    times.begin_step()


def test_a_profile_has_each_layers_times() -> None:
    clock = GivenTime()
    model = nn.Sequential(Layer(clock, 5), Layer(clock, 7))
    with timed(model, clock) as times:
        assert times.profile() is None
        train(model, clock, times, 3)
        assert times.profile() == Profile(
            forward=2,
            backward=6,
            update=0,
            parameters=(
                Parameter(nbytes=20, ready=6, read=0),
                Parameter(nbytes=28, ready=3, read=1),
            ),
        )


def test_waits_before_a_layer_are_left_out_and_data_come_before_the_forward() -> None:
    clock = GivenTime()
    model = nn.Sequential(Layer(clock, 5), Layer(clock, 7))

    def wait(*_: object) -> None:
        clock.spend(100, "wait", bucket=0)

    for layer in model:  # as the replica's hooks do, which are there before
        layer.register_forward_pre_hook(wait)
    model.register_forward_hook(wait)
    with timed(model, clock) as times:
        train(model, clock, times, 1, data=4)
        profile = times.profile()
    assert profile is not None
    assert (profile.forward, profile.backward) == (6, 6)
    assert [p.read for p in profile.parameters] == [4, 5]
    assert [p.ready for p in profile.parameters] == [6, 3]
    assert not profile.reduces


def test_an_update_before_a_layer_is_a_part_of_the_forward() -> None:
    clock = GivenTime()
    model = nn.Sequential(Layer(clock, 5), Layer(clock, 7))

    def update(*_: object) -> None:
        clock.passes(2)

    for layer in model:
        layer.register_forward_pre_hook(update)
    with timed(model, clock) as times:
        train(model, clock, times, 1)
        profile = times.profile()
    assert profile is not None
    assert (profile.forward, profile.backward) == (6, 6)
    assert [p.read for p in profile.parameters] == [0, 3]


def test_sums_that_are_awaited_before_the_update_overlap_no_forward() -> None:
    clock = GivenTime()
    model = nn.Sequential(Layer(clock, 5), Layer(clock, 7))
    with timed(model, clock) as times:
        times.begin_step()
        model(torch.ones(1)).sum().backward()
        clock.spend(100, "wait", bucket=0)
        clock.passes(3)  # clips
        times.begin_step(reduced=True)
        profile = times.profile()
    assert profile is not None
    assert (profile.forward, profile.backward, profile.reduces) == (5, 6, True)
    # The 48 bytes take 12 seconds, of which the first bucket's 7 begin in second 3.
    assert seconds_by_urgency(profile, [[0], [1]], 1 / 4) == 3 + 12 + 5
    assert seconds_in_order(profile, [[0], [1]], 1 / 4) == 3 + 12 + 5


def test_gradients_that_accumulate_are_complete_at_the_end() -> None:
    clock = GivenTime()
    model = nn.Sequential(Layer(clock, 5), Layer(clock, 7))
    with timed(model, clock, accumulates=True) as times:
        train(model, clock, times, 1)
        profile = times.profile()
    assert profile is not None
    assert [p.ready for p in profile.parameters] == [6, 6]


def test_a_parameter_that_is_read_outside_is_needed_at_once_and_one_that_is_not_read_never() -> (
    None
):
    clock = GivenTime()
    model = nn.Sequential(Layer(clock, 5), Layer(clock, 7))
    model[0].unused = Layer(clock, 1)
    with timed(model, clock, outside=frozenset({model[1].weight})) as times:
        train(model, clock, times, 1)
        profile = times.profile()
    assert profile is not None
    times_of = {p.nbytes: (p.read, p.ready) for p in profile.parameters}
    assert times_of == {20: (0, 6), 28: (0, 3), 4: (2, 6)}


def test_a_step_without_a_backward_is_no_step_of_the_profile() -> None:
    clock = GivenTime()
    model = nn.Sequential(Layer(clock, 5))
    with timed(model, clock) as times:
        times.begin_step()
        model(torch.ones(1))
        times.begin_step()
        assert times.profile() is None


def test_a_step_with_a_forward_after_its_backward_is_no_step_of_the_profile() -> None:
    clock = GivenTime()
    model = nn.Sequential(Layer(clock, 5))
    with timed(model, clock) as times:
        times.begin_step()
        model(torch.ones(1)).sum().backward()
        model(torch.ones(1))  # an evaluation
        times.begin_step()
        assert times.profile() is None


def test_of_two_forwards_a_step_the_first_reads() -> None:
    clock = GivenTime()
    model = nn.Sequential(Layer(clock, 5), Layer(clock, 7))
    with timed(model, clock) as times:
        times.begin_step()
        (model(torch.ones(1)) + model(torch.ones(1))).sum().backward()
        times.begin_step()
        profile = times.profile()
    assert profile is not None
    assert (profile.forward, profile.backward) == (4, 12)
    assert [p.read for p in profile.parameters] == [0, 1]


def test_one_step_that_awaits_its_sums_is_enough_for_the_profile_to_say_so() -> None:
    clock = GivenTime()
    model = nn.Sequential(Layer(clock, 5))
    with timed(model, clock) as times:
        for reduced in (False, True, False):
            times.begin_step(reduced=reduced)
            model(torch.ones(1)).sum().backward()
        times.begin_step()
        profile = times.profile()
    assert profile is not None
    assert profile.reduces


def test_closed_pass_times_leave_no_hook() -> None:
    clock = GivenTime()
    model = nn.Sequential(Layer(clock, 5))
    with timed(model, clock):
        assert model[0]._forward_pre_hooks
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert not model[0].weight._post_accumulate_grad_hooks
