"""Options of the exchange that are refused on GPUs."""

from __future__ import annotations

import pytest

from paceline.config.world import SyncConfig
from paceline.errors import ConfigError
from paceline.session.exchange_checks import refuse_gpu


@pytest.mark.parametrize(
    "config",
    [
        SyncConfig(sync="auto"),
        SyncConfig(sync="notified", wire="int8"),
        SyncConfig(sync="average", wire="int4", connections=2),
    ],
)
def test_options_that_a_method_has_on_gpus_are_accepted(config: SyncConfig) -> None:
    refuse_gpu(config)


def test_a_wire_needs_a_method_that_is_tried_on_gpus() -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_gpu(SyncConfig(sync="auto", wire="int8"))
    assert str(refused.value) == (
        "--wire int8 needs --sync notified, which --sync auto does not try on GPUs; set --sync "
        "notified, or leave out --wire."
    )
