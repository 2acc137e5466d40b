"""The options of averaging: `Average`, its short form and its flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from paceline.config.average import (
    ARGUMENTS,
    OUTER_RULES,
    WITHOUT_DELAY,
    AverageConfig,
    require_merge,
)
from paceline.errors import ConfigError
from paceline.update.outer.average import RULES, Average, average_from_flags, parse_average
from paceline.update.outer.bmuf import BMUF
from paceline.update.outer.diloco import DiLoCo
from paceline.update.outer.easgd import EASGD
from paceline.update.outer.mean import Mean
from paceline.update.outer.outer_rule import OuterRule
from paceline.update.outer.sparseloco import SparseLoCo


def from_flags(sync: str = "average", **flags: object) -> Average | None:
    return average_from_flags(sync, AverageConfig(**flags))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "average"),
    [
        ("average", Average()),
        ("average:every=50", Average(every=50)),
        ("average:every=8,outer=diloco", Average(every=8, outer=DiLoCo())),
        ("average: outer = easgd , lr = 0.8", Average(outer=EASGD(beta=0.8))),
        ("average:outer=bmuf,lr=0.5,momentum=0", Average(outer=BMUF(lr=0.5, momentum=0.0))),
        ("average:outer=sparseloco,momenta=reset", Average(outer="sparseloco", momenta="reset")),
        (
            "average:every=1@0,50@1000,fragments=4,delay=3,mix=0.25",
            Average(every=[(0, 1), (1000, 50)], fragments=4, delay=3, mix=0.25),
        ),
    ],
)
def test_a_short_form_says_the_same_as_the_class(text: str, average: Average) -> None:
    assert parse_average(text) == average


@pytest.mark.parametrize("sync", ["auto", "notified", "allreduce", "averages"])
def test_the_name_of_another_exchange_is_no_short_form(sync: str) -> None:
    assert parse_average(sync) is None


@pytest.mark.parametrize(("every", "steps"), [(200, 24), ("30@0,9@20", 24), (2, 1)])
def test_rounds_that_are_longer_than_the_run_are_refused(every: Any, steps: int) -> None:
    rule = f"must be at most the run's {steps} steps?, or its workers would merge only after"
    with pytest.raises(ConfigError, match=rule):
        require_merge(every, steps)


@pytest.mark.parametrize("every", [24, 1, "30@0,4@20", "1@0,50@20", "20@0,500@1000"])
def test_rounds_that_end_in_the_run_are_fine(every: Any) -> None:
    require_merge(every, 24)


def test_flags_say_the_same_as_the_class() -> None:
    assert from_flags() == Average() == Average(every=50, outer=Mean())
    assert from_flags(
        average_every="20@0,5@100",
        outer="bmuf",
        outer_lr=0.5,
        outer_momentum=0.0,
        fragments=3,
        average_delay=2,
        average_mix=0.0,
        average_momenta="reset",
    ) == Average(
        every=((0, 20), (100, 5)),
        outer=BMUF(lr=0.5, momentum=0.0),
        fragments=3,
        delay=2,
        mix=0.0,
        momenta="reset",
    )
    assert from_flags(outer="easgd", outer_lr=0.5) == Average(outer=EASGD(beta=0.5))


def test_with_another_exchange_flags_of_averaging_are_refused() -> None:
    assert from_flags("notified") is None
    with pytest.raises(ConfigError) as caught:
        from_flags("auto", outer="diloco")
    assert str(caught.value) == (
        "--outer diloco needs --sync average: with --sync auto workers exchange gradients in each "
        "step."
    )


def test_a_merge_travels_for_a_quarter_of_the_steps_until_the_next_take() -> None:
    assert Average(every=50).steps_of_delay == 12
    assert Average(every=50, fragments=4).steps_of_delay == 3
    assert Average(every=2, fragments=4).steps_of_delay == 0
    assert Average(every="1@0,20@9").steps_of_delay == 5
    assert Average(every=50, outer=EASGD()).steps_of_delay == 0
    assert Average(every=50, delay=3).steps_of_delay == 3


def test_the_schedule_is_of_the_options() -> None:
    schedule = Average(every=4, fragments=2, delay=1).schedule(steps=6)
    assert [schedule.taken_after(step) for step in range(6)] == [(), (0,), (), (1,), (), (0, 1)]
    assert schedule.applied_before(3) == (0,)


def test_facts_tell_options_apart_and_hold_no_address() -> None:
    class Own(OuterRule):
        pass

    assert Average(every="50").facts() == Average(every=50, outer="mean").facts()
    assert Average(outer=DiLoCo(lr=0.5)).facts() != Average(outer=DiLoCo()).facts()
    assert Average(outer=Own()).facts()["outer"] == "Own"


def test_the_table_of_flags_is_the_classes() -> None:
    assert OUTER_RULES.keys() == RULES.keys()
    for name, options in OUTER_RULES.items():
        parameters = set(inspect.signature(RULES[name]).parameters)
        names = {"beta" if (name, option) == ("easgd", "lr") else option for option in options}
        assert names == parameters & {"lr", "momentum", "beta"}
        assert (name in WITHOUT_DELAY) != RULES[name]().allows_delay
    flags = {field.name for field in fields(AverageConfig)} - {"average_server"}  # of `train` alone
    assert ARGUMENTS.keys() == flags
    assert {f.name for f in fields(Average)} | {"lr", "momentum"} == set(ARGUMENTS.values())


SCHEDULE = "must be a number of steps, or phases such as 1@0,50@1000."


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: from_flags(average_every="0"),
            "--average_every 0: must be at least 1 step; 1 merges after each step.",
        ),
        (lambda: from_flags(average_every="often"), f"--average_every often: {SCHEDULE}"),
        (lambda: from_flags(average_every="1,50"), f"--average_every 1,50: {SCHEDULE}"),
        (lambda: from_flags(average_every="-5"), f"--average_every -5: {SCHEDULE}"),
        (lambda: from_flags(average_every=""), f"--average_every: {SCHEDULE}"),
        (
            lambda: from_flags(average_every="1@5,50@1000"),
            "--average_every 1@5,50@1000: phases must begin at step 0 and be in ascending order "
            "of steps.",
        ),
        (
            lambda: from_flags(outer_momentum=0.9),
            "--outer_momentum 0.9: --outer mean has no momentum; leave it out, or use --outer "
            "bmuf or diloco.",
        ),
        (
            lambda: from_flags(outer="sparseloco", outer_momentum=0.0),
            "--outer_momentum 0.0: --outer sparseloco has no momentum; leave it out, or use "
            "--outer bmuf or diloco.",
        ),
        (
            lambda: from_flags(outer_lr=0.7),
            "--outer_lr 0.7: --outer mean has no learning rate; leave it out, or use --outer "
            "easgd or bmuf or diloco or sparseloco.",
        ),
        (
            lambda: from_flags(outer="diloco", outer_lr=0.0),
            "--outer_lr 0.0: must be greater than 0.",
        ),
        (
            lambda: from_flags(outer="easgd", outer_lr=1.5),
            "--outer_lr 1.5: must be at most 1 with --outer easgd; use 0.9, the paper's, or "
            "another --outer.",
        ),
        (
            lambda: from_flags(outer="diloco", outer_momentum=1.0),
            "--outer_momentum 1.0: must be at least 0 and less than 1.",
        ),
        (lambda: from_flags(fragments=0), "--fragments 0: must be a whole number of at least 1."),
        (
            lambda: from_flags(average_every="5", average_delay=5),
            "--average_delay 5: must be less than the longest round of --average_every, 5 steps: a "
            "merge is applied before the next one is taken; use at most 4, or longer rounds.",
        ),
        (
            lambda: from_flags(outer="easgd", average_delay=1),
            "--average_delay 1: --outer easgd changes the weights that it was computed from; use "
            "--average_delay 0, or another --outer.",
        ),
        (
            lambda: from_flags(average_mix=0.5, average_delay=0),
            "--average_mix 0.5: needs a delay: without one a worker has no newer weights to mix "
            "in; leave it out, or set --average_delay to 1 or more, with an --outer that "
            "allows it.",
        ),
        (
            lambda: Average(mix=0.5, outer=EASGD()),
            "mix 0.5: needs a delay: without one a worker has no newer weights to mix in; leave it "
            "out, or set delay to 1 or more, with an outer that allows it.",
        ),
        (
            lambda: from_flags(average_mix=1.0, average_delay=1),
            "--average_mix 1.0: must be at least 0 and less than 1.",
        ),
        (
            lambda: from_flags(average_momenta="drop"),
            "--average_momenta drop: must be one of keep, reset, average.",
        ),
        (
            lambda: Average(every=0),
            "every 0: must be at least 1 step; 1 merges after each step.",
        ),
        (lambda: Average(every=True), f"every True: {SCHEDULE}"),
        (lambda: Average(every=2.5), f"every 2.5: {SCHEDULE}"),  # type: ignore[arg-type]
        (lambda: Average(every=[]), f"every []: {SCHEDULE}"),
        (lambda: Average(every=[5]), f"every [5]: {SCHEDULE}"),  # type: ignore[list-item]
        (
            lambda: Average(every=[(0, 2), (0, 3)]),
            "every [(0, 2), (0, 3)]: phases must begin at step 0 and be in ascending order of "
            "steps.",
        ),
        (lambda: Average(delay=-1), "delay -1: must be a whole number of at least 0."),
        (
            lambda: Average(outer=DiLoCo),  # type: ignore[arg-type]
            "outer <class 'paceline.update.outer.diloco.DiLoCo'>: must be mean, easgd, bmuf, "
            "diloco, sparseloco, or an instance of a class of outer rules; create one, as in "
            "DiLoCo(lr=0.7), or derive your class from OuterRule.",
        ),
        (
            lambda: Average(outer="adam"),  # type: ignore[arg-type]
            "outer adam: must be one of mean, easgd, bmuf, diloco, sparseloco.",
        ),
        (
            lambda: Average(outer=EASGD(), delay=2),
            "delay 2: outer EASGD changes the weights that it was computed from; use delay 0, or "
            "another outer.",
        ),
        (
            lambda: Average(mix="half"),  # type: ignore[arg-type]
            "mix 'half': must be a number.",
        ),
        (
            lambda: parse_average("average:every"),
            "sync='average:every': 'every' must be an option with its value, such as every=50, "
            "given once; the options are delay, every, fragments, lr, mix, momenta, momentum, "
            "outer, through.",
        ),
        (
            lambda: parse_average("average:every=5,every=6"),
            "sync='average:every=5,every=6': 'every=6' must be an option with its value, such as "
            "every=50, given once; the options are delay, every, fragments, lr, mix, momenta, "
            "momentum, outer, through.",
        ),
        (
            lambda: parse_average("average:"),
            "sync='average:': '' must be an option with its value, such as every=50, given once; "
            "the options are delay, every, fragments, lr, mix, momenta, momentum, outer, through.",
        ),
        (
            lambda: parse_average("average:fragments=two"),
            "fragments two: must be a whole number.",
        ),
        (lambda: parse_average("average:outer=diloco,lr=-1"), "lr -1: must not be negative."),
        (
            lambda: parse_average("average:momentum=0.9"),
            "momentum 0.9: outer mean has no momentum; leave it out, or use outer bmuf or diloco.",
        ),
    ],
)
def test_a_mistake_is_refused_with_one_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == sentence


def test_the_rules_of_names_have_their_papers_numbers() -> None:
    assert Average(outer="diloco").rule == DiLoCo(lr=0.7, momentum=0.9)
    assert Average(outer="sparseloco").rule == SparseLoCo(lr=1.0, error_decay=0.95)
    assert Average(outer="easgd").rule == EASGD(beta=0.9, alpha=None)
    assert Average(outer="bmuf").rule == BMUF(lr=1.0, momentum=None, form="classical")
