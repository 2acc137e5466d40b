"""Shards' parameters share the memory for an update: the model has them."""

from __future__ import annotations

import torch
from torch import nn

from paceline.reduce.buckets import partition
from paceline.update.shard_optimizer import ShardOptimizer


def test_shards_are_updated_as_by_torch_and_their_parameters_share_memory() -> None:
    names = {nn.Parameter(torch.arange(100.0)): "p", nn.Parameter(torch.arange(100.0) - 7): "q"}
    plain = [nn.Parameter(p.detach().clone()) for p in names]
    one, other = (torch.optim.SGD([*ps], lr=0.1, momentum=0.9) for ps in (names, plain))
    buckets = partition(names, dict.fromkeys(names, 0), 400)
    assert len(buckets) == 2
    shards = ShardOptimizer(one, buckets)
    ranges = {0: slice(20, 80), 1: slice(50, 100)}
    memory = {index: torch.zeros(own.stop - own.start) for index, own in ranges.items()}
    shards.add_shards({index: (own, memory[index]) for index, own in ranges.items()})
    shards.divide_state()
    of_name = dict(zip(names.values(), zip(names, plain, strict=True), strict=True))
    for number in range(3):
        for index, p in enumerate(plain):
            p.grad = torch.full((100,), number + 1.0 + index)
        other.step()
        shards.freeze()
        for index, own in ranges.items():
            (name,) = buckets[index].names
            (p, reference) = of_name[name]
            assert reference.grad is not None
            memory[index].copy_(reference.grad[own])
            shards.update(index, memory[index], [1], None)
            assert torch.equal(memory[index], reference.detach()[own])
            with torch.no_grad():
                p[own] = memory[index]
    storages = [own[0].values.untyped_storage() for own in shards._shards.fragments.values()]
    assert storages[0].data_ptr() == storages[1].data_ptr()
    assert storages[0].nbytes() == 60 * 4
    for index, own in ranges.items():
        (name,) = buckets[index].names
        (_, _, state) = shards.local()[name]
        momentum = other.state[of_name[name][1]]["momentum_buffer"]
        assert torch.equal(state["momentum_buffer"], momentum[own])
    shards.close()
