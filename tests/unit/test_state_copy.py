"""Copies of state dicts in this machine's memory."""

from __future__ import annotations

import torch

from paceline.state.state_copy import copy_state


def test_a_sparse_tensor_is_copied_too() -> None:
    state = {"adjacency": torch.eye(3).to_sparse()}
    first = copy_state(state)
    second = copy_state(state, first)
    assert torch.equal(second["adjacency"].to_dense(), torch.eye(3))
    assert second["adjacency"] is not state["adjacency"]
