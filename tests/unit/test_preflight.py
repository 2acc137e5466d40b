"""What ranks compare before the first step: all come to the same verdict, in both ranks' words."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from paceline.cluster.membership.generation import Group
from paceline.cluster.rendezvous.preflight import (
    compare,
    configuration_facts,
    data_facts,
    model_facts,
    token_facts,
    version_facts,
)
from paceline.cluster.stores.failure_report import FAILURE, FailureReport
from paceline.config.data import DataConfig
from paceline.config.optim import OptimConfig
from paceline.config.train import TrainConfig
from paceline.errors import CommTimeout, ConfigError, PeerLost
from paceline.version import VERSION
from tests.harness.processes.worlds import world_of


def member(rank: int) -> Group:
    return world_of((1, 1, 1), rank)


def verdicts(subject: str, *facts: dict[str, str]) -> list[str]:
    """Compare the ranks' facts; return what each rank is told, "" where all is well."""
    store = HashStore()

    def of(rank: int) -> str:
        try:
            compare(store, member(rank), subject, facts[rank], timeout=20)
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(of, range(3)))


def test_equal_facts_let_all_pass() -> None:
    facts = {"--seed": "1", "--batch_size": "32"}
    assert verdicts("configuration", facts, facts, facts) == ["", "", ""]


def test_all_ranks_say_the_same_of_the_lowest_that_differs() -> None:
    facts = {"--batch_size": "32", "--seed": "1"}
    told = verdicts(
        "configuration", facts, {**facts, "--batch_size": "64"}, {**facts, "--seed": "2"}
    )
    sentence = (
        "--batch_size is 32 on rank 0 (a) and 64 on rank 1 (b): give all machines the same value."
    )
    assert told == [sentence] * 3


def test_the_last_rank_alone_is_found_too() -> None:
    facts = {"torch": "2.13"}
    told = verdicts("versions", facts, facts, {"torch": "2.12"})
    assert set(told) == {
        "torch is 2.13 on rank 0 (a) and 2.12 on rank 2 (c): install the same version on all "
        "machines."
    }


def test_a_name_that_one_rank_lacks_is_missing_there() -> None:
    few = model_facts([("fc.weight", torch.zeros(3, 2))])
    more = model_facts([("extra", torch.zeros(1)), ("fc.weight", torch.zeros(3, 2))])
    lacks = "the model's extra is missing on rank 0 (a) and [1] float32 on rank 1 (b): build the "
    assert verdicts("model", few, more, few)[0] == lacks + "same model on all ranks."
    assert "is [1] float32 on rank 0 (a) and missing on" in verdicts("model", more, few, more)[2]


def test_shape_type_and_order_of_a_model_count() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    first = nn.ModuleDict({"a": layers[0], "b": layers[1]})
    other = nn.ModuleDict({"b": layers[1], "a": layers[0]})
    facts = [model_facts(m.named_parameters()) for m in (first, other)]
    assert facts[0]["the model's a.weight"] == "[2, 2] float32"
    assert "the order of the model's parameters" in verdicts("model", *facts, facts[0])[1]
    half = model_facts(first.half().named_parameters())
    assert (
        "is [2, 2] float32 on rank 0 (a) and [2, 2] float16"
        in verdicts("model", *facts[:1], half, half)[0]
    )


@pytest.mark.parametrize(
    ("subject", "advice"),
    [
        ("versions", "check its output."),
        (
            "loader 1",
            "check its output; all ranks must call paceline.loader(), not only rank 0.",
        ),
    ],
)
def test_a_rank_that_says_nothing_is_named(subject: str, advice: str) -> None:
    with pytest.raises(CommTimeout) as caught:
        compare(HashStore(), member(0), subject, version_facts(), timeout=0.05)
    late = f"rank 1 on machine 1 (b), rank 2 on machine 2 (c) didn't report its {subject} within"
    assert str(caught.value) == f"{late} 0.05 s: {advice}"


def test_an_earlier_generations_facts_arent_compared_with_this_ones() -> None:
    store = HashStore()
    for token, facts in (("first", {"--seed": "1"}), ("second", {"--seed": "2"})):
        groups = [world_of((1, 1), rank, token=token) for rank in range(2)]

        def agree(group: Group, facts: dict[str, str] = facts) -> None:
            compare(store, group, "configuration", facts, timeout=20)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(agree, groups))


def test_ranks_with_different_tokens_find_it_out_without_a_timeout() -> None:
    store = HashStore()

    def of(rank: int) -> str:
        group = world_of((1, 1), rank, token=f"token {rank}")
        facts = token_facts(group.generation.token)
        with pytest.raises(ConfigError) as caught:
            compare(store, group, "job token", facts, timeout=5)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(of, range(2)))
    assert told[0] == told[1]
    assert told[0].endswith("start all processes as one run.")


def test_a_rank_that_failed_isnt_waited_for() -> None:
    store = HashStore()
    store.set(FAILURE, FailureReport(text="rank 2: no disk", status=1).to_text())
    with pytest.raises(PeerLost, match="rank 2: no disk"):
        compare(store, member(0), "versions", {}, timeout=60)


def test_the_configurations_facts_are_flags_without_what_may_differ() -> None:
    config = TrainConfig(data=DataConfig(train_data="db"))
    facts = configuration_facts(config)
    assert (facts["--batch_size"], facts["--trace_steps"]) == ("32", "not given")
    assert not {"--shard_id", "--redis_url", "--train_data"} & facts.keys()
    other = configuration_facts(replace(config, optim=OptimConfig(batch_size=64)))
    assert {name for name in facts if facts[name] != other[name]} == {"--batch_size"}


def test_the_other_facts_have_names_that_a_person_knows() -> None:
    assert set(version_facts()) == {"Python", "paceline", "torch"}
    assert version_facts()["paceline"] == VERSION
    assert data_facts("train_data", 15, "ab") == {
        "--train_data's number of records": "15",
        "--train_data's fingerprint": "ab",
    }
    assert "secret" not in str(token_facts("secret"))
    assert token_facts("secret") != token_facts("another")
