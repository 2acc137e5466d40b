"""A state tree survives its way as bytes; bytes that aren't one are refused, and nothing is run."""

from __future__ import annotations

import json
import pickle
from fractions import Fraction
from typing import Any

import pytest
import torch

from paceline.errors import CommError, ConfigError
from paceline.state.state_bytes import pack_state, unpack_state
from tests.harness.equivalence.snapshot_ranks import first_difference

STATE = {
    "scale": 2.5,
    "layout": (((0,), (1, 2)), 1),
    "missed": {"w": (0, 5, torch.arange(5.0)), "v": (1, 2, torch.ones(1, dtype=torch.bfloat16))},
    3: [None, True, "é", float("inf"), 2**70],
    "image": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "step": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "gaps": torch.arange(10)[::2],
}


def packed(state: Any) -> bytes:
    return b"".join(pack_state(state))


def test_a_tree_is_the_same_afterwards_with_its_strides() -> None:
    state = unpack_state(packed(STATE))
    assert first_difference(STATE, state) == ""
    assert state["image"].stride() == STATE["image"].stride()  # type: ignore[attr-defined]


def test_dense_tensors_are_not_copied() -> None:
    values = torch.zeros(1000)
    chunks = pack_state({"a": values})
    values.fill_(1.0)
    assert unpack_state(b"".join(chunks))["a"].sum() == 1000
    data = bytearray(packed({"a": values}))
    unpack_state(data)["a"].fill_(3.0)
    assert unpack_state(data)["a"][0] == 3.0


@pytest.mark.parametrize("value", [{1}, Fraction(1), torch.eye(2).to_sparse()])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="another rank can't have a copy"):
        pack_state({"a": [value]})


def header(tree: object) -> bytes:
    text = json.dumps(tree).encode()
    return (len(text).to_bytes(8, "little") + text).ljust(256)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 64,
        pickle.dumps(STATE),
        *(packed(STATE)[:length] for length in (7, 60, 400, len(packed(STATE)) - 40)),
        header({"tensor": ["float32", [1000], [1], 0]}),
        header({"tensor": ["float32", [2], [1], -8]}),
        header({"tensor": ["float32", [2], [1000], 0]}),
        header({"tensor": ["float32", [-1], [1], 0]}),
        header({"tensor": ["object", [1], [1], 0]}),
        header({"code": "x"}),
        header({"dict": [[{"dict": []}, 1]]}),
        (10**6).to_bytes(8, "little") + b"[" * 10**6,
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CommError, match="same version"):
        unpack_state(data)
