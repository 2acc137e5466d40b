"""Preflight of `paceline train`: what the ranks compare before they connect."""

from __future__ import annotations

from torch._C._distributed_c10d import Store

from paceline.cluster.membership.generation import Group
from paceline.cluster.rendezvous.preflight import (
    compare,
    configuration_facts,
    data_facts,
    token_facts,
    version_facts,
)
from paceline.config.train import TrainConfig
from paceline.session.sources import Databases


def agree_on_inputs(config: TrainConfig, group: Group, store: Store, sources: Databases) -> None:
    """Require the same job token, configuration, versions and data of all ranks; collective.

    Raises:
        ConfigError: two ranks differ; names what, and both values.
        CommError: a rank is late (`--first_iter_timeout`) or has failed.
    """
    limit = config.world.first_iter_timeout
    data = data_facts("train_data", len(sources.train), sources.train.fingerprint)
    if sources.test is not None:
        data |= data_facts("test_data", len(sources.test), sources.test.fingerprint)
    subjects = {
        "job token": token_facts(group.generation.token),
        "configuration": configuration_facts(config),
        "versions": version_facts(),
        "data": data,
    }
    for subject, facts in subjects.items():
        compare(store, group, subject, facts, timeout=limit)
