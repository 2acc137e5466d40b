"""A shard's parameters take memory during its update only: the model has them."""

from __future__ import annotations

import torch
from torch import nn

from paceline.reduce.buckets import partition
from paceline.update.shard_optimizer import ShardOptimizer


def test_a_shard_is_updated_as_by_torch_and_holds_nothing_but_its_state() -> None:
    parameter = nn.Parameter(torch.arange(100.0))
    plain = nn.Parameter(torch.arange(100.0))
    one, other = (torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in (parameter, plain))
    shards = ShardOptimizer(one, partition({parameter: "p"}, {parameter: 0}, 4000))
    memory = torch.zeros(60)
    shards.add_shard(0, slice(20, 80), memory)
    shards.divide_state()
    for number in range(3):
        gradient = torch.full((100,), number + 1.0)
        plain.grad = gradient
        other.step()
        memory.copy_(gradient[20:80])
        shards.freeze()
        shards.update(0, memory, [1], None)
        assert torch.equal(memory, plain.detach()[20:80])
        with torch.no_grad():
            parameter[20:80] = memory
    (fragment,) = shards._shards.fragments[0]
    assert fragment.values.shape == (60,)
    assert fragment.values.untyped_storage().nbytes() == 0
    (_, _, state) = shards.local()["p"]
    assert torch.equal(state["momentum_buffer"], other.state[plain]["momentum_buffer"][20:80])
    shards.close()
