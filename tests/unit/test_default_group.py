"""Torch's default group, which `join` makes for libraries that look for it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.errors import ConfigError


def test_it_lives_as_long_as_the_world() -> None:
    with paceline.join(default_group=True):
        assert dist.get_world_size() == 1
        value = torch.tensor(3.0)
        dist.all_reduce(value)
        assert value == 3.0
    assert not dist.is_initialized()


def test_one_that_a_script_has_made_is_not_replaced() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=r"^default_group=True was given, but torch\.dist"):
            paceline.join(default_group=True)
        paceline.join().close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_without_it_there_is_none() -> None:
    with paceline.join():
        assert not dist.is_initialized()
