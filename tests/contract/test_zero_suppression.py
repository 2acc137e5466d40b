"""Zero suppression: the same bits as if all values travelled, by fewer bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from paceline.algorithms.sharded import make_sharded
from paceline.codecs.codecs import CODECS
from paceline.comm.peer_activities import Timeout
from paceline.comm.window import Source, WindowWrapper, bytes_of
from paceline.reduce.put_engine.layout import BucketSpec, Topology, lay_out
from paceline.reduce.put_engine.put_exchange import PutExchange
from tests.harness.equivalence.large_batch import State, Training
from tests.harness.equivalence.put_synchronizers import in_threads, notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.twins.window import WindowGroup

ROWS, WIDTH = 901, 37  # neither a row nor the table is a multiple of a block
MACHINES = [(1, 1), (1, 1, 1), (2, 1), (2, 2), (1, 1, 1, 1)]
STEPS = 8
Gradients = Callable[[int, int], Tensor]  # of a rank and a step


def few_rows(rank: int, step: int) -> Tensor:
    """Make a gradient of some rows; one of -0.0, and a first row that only rank 0 has."""
    random = torch.Generator().manual_seed(100 * step + rank)
    gradient = torch.zeros(ROWS, WIDTH)
    used = torch.randint(0, ROWS, (25,), generator=random)
    gradient[used] = torch.randn(len(used), WIDTH, generator=random) * 10.0**rank
    gradient[ROWS // 2 + step] = -0.0
    gradient[0] = 1.0 if rank == 0 else 0.0
    return gradient


def sometimes_dense(rank: int, step: int) -> Tensor:
    """Make a gradient that is dense on one rank in a step, on all in another, and once zero."""
    random = torch.Generator().manual_seed(100 * step + rank)
    if step == 5:
        return torch.zeros(ROWS, WIDTH)
    if step == 3 or (step == 1 and rank == 1):
        return torch.randn(ROWS, WIDTH, generator=random)
    return few_rows(rank, step)


def with_nonfinite_values(rank: int, step: int) -> Tensor:
    """Make a gradient of some rows, among them infinities and NaNs."""
    gradient = few_rows(rank, step)
    if step == 2 and rank == 1:
        gradient[7], gradient[8, 1] = torch.nan, torch.inf
    return gradient


def half_empty(rank: int, step: int) -> Tensor:
    """Make a gradient whose second half is zero: other owners get nothing but zeros."""
    random = torch.Generator().manual_seed(100 * step + rank)
    gradient = torch.zeros(ROWS, WIDTH)
    gradient[: ROWS // 2] = torch.randn(ROWS // 2, WIDTH, generator=random)
    return gradient


class Counting(WindowWrapper):
    """Window that counts the bytes that it puts to other machines."""

    def __init__(self, window: Any, topology: Topology) -> None:
        super().__init__(window)
        own = topology.groups[topology.group_of(window.rank)]
        self.bytes, self._same_machine, self._lock = 0, own, threading.Lock()

    def put(self, peer: int, offset: int, source: Source, *rest: int) -> None:
        """Count, and put."""
        if peer not in self._same_machine:
            with self._lock:
                self.bytes += sum(part.numel() for part in bytes_of(source))
        self._window.put(peer, offset, source, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._window, name)


Result = tuple[list[Tensor], list[tuple[int, int]], int]  # sums, traffic, bytes put


def exchange(
    machines: tuple[int, ...],
    codec: str,
    gradients: Gradients,
    *,
    suppresses: bool,
    dtype: torch.dtype = torch.float32,
    weights: Sequence[float] = (0.1, 0.4, 0.2, 0.3),
    abandoned: int | None = None,
    rest: int = 0,
    returns_parameters: bool = False,
) -> list[Result]:
    """Exchange some steps of a table, and `rest` more values behind it; return what ranks got."""
    lengths = (ROWS * WIDTH, rest) if rest else (ROWS * WIDTH,)
    spec = BucketSpec(
        lengths=lengths,
        dtype=dtype,
        codec=CODECS[codec],
        returns_parameters=returns_parameters,
        suppresses_zeros=suppresses,
    )
    topology = Topology.of(machines)
    layout = lay_out([spec], topology)
    group = WindowGroup(sum(machines), layout.size, layout.notifications, machines)
    tensors = [torch.zeros(ROWS, WIDTH, dtype=dtype), torch.zeros(rest, dtype=dtype)]
    templates = [tensors[: len(lengths)]]
    names = [["table", "rest"][: len(lengths)]]

    def train(rank: int) -> Result:
        window = Counting(group.window(rank), topology)
        made = PutExchange(window, layout, templates, names, Timeout(60.0, 60.0))
        got, traffic = [], []
        for step in range(STEPS):
            made.begin(1.0)
            values = [gradients(rank, step).to(dtype), torch.full((rest,), rank + 1.0, dtype=dtype)]
            version = made.send(0, values[: len(lengths)], weights[rank], "a test")
            if returns_parameters:
                made.return_sums(0, None)
            sums = made.wait(0, version)
            got += [value.clone() for value in sums if value is not None]
            traffic.append(made.traffic[0])
            if step == abandoned:
                made.abandon(0, None)
        made.drain()
        made.close()
        return got, traffic, window.bytes

    return run_ranks(sum(machines), lambda c: train(c.rank))


def bits(tensor: Tensor) -> Tensor:
    """View a tensor's bits, which tell -0.0 from 0.0 and equal NaNs."""
    return tensor.contiguous().view(torch.uint8)


def same_bits(one: Sequence[Result], other: Sequence[Result]) -> bool:
    return all(
        len(a) == len(b) and all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))
        for (a, *_), (b, *_) in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("machines", MACHINES, ids=str)
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(
    "gradients", [few_rows, sometimes_dense, with_nonfinite_values, half_empty]
)
def test_sums_have_the_same_bits_as_without_suppression(
    machines: tuple[int, ...], codec: str, gradients: Gradients
) -> None:
    plain = exchange(machines, codec, gradients, suppresses=False)
    assert same_bits(exchange(machines, codec, gradients, suppresses=True), plain)


@pytest.mark.parametrize("machines", [(1, 1), (2, 1)], ids=str)
def test_float64_and_bfloat16_sums_have_the_same_bits(machines: tuple[int, ...]) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        plain = exchange(machines, "fp32", few_rows, suppresses=False, dtype=dtype)
        assert same_bits(exchange(machines, "fp32", few_rows, suppresses=True, dtype=dtype), plain)


@pytest.mark.parametrize("machines", [(1, 1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_sums_with_a_rank_without_samples_have_the_same_bits(
    machines: tuple[int, ...], codec: str
) -> None:
    weights = (0.7, 0.0, 0.3)
    plain, few = (
        exchange(machines, codec, with_nonfinite_values, suppresses=suppresses, weights=weights)
        for suppresses in (False, True)
    )
    assert same_bits(few, plain)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_sums_after_an_abandoned_step_have_the_same_bits(codec: str) -> None:
    plain = exchange((1, 1), codec, few_rows, suppresses=False, abandoned=3)
    assert same_bits(exchange((1, 1), codec, few_rows, suppresses=True, abandoned=3), plain)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_sums_of_a_table_and_a_small_parameter_have_the_same_bits(codec: str) -> None:
    plain = exchange((1, 1, 1), codec, few_rows, suppresses=False, rest=101)
    assert same_bits(exchange((1, 1, 1), codec, few_rows, suppresses=True, rest=101), plain)


@pytest.mark.parametrize("machines", MACHINES, ids=str)
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("gradients", [few_rows, sometimes_dense])
def test_the_counted_traffic_is_what_is_put(
    machines: tuple[int, ...], codec: str, gradients: Gradients
) -> None:
    ranks = exchange(machines, codec, gradients, suppresses=True)
    for _, traffic, put in ranks:
        assert sum(sent for sent, _ in traffic) == put
    for step in range(STEPS):
        sent = sum(traffic[step][0] for _, traffic, _ in ranks)
        assert sent == sum(traffic[step][1] for _, traffic, _ in ranks)


@pytest.mark.parametrize("machines", [(1, 1), (1, 1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(("codec", "most"), [("fp32", 0.2), ("bf16", 0.4), ("int8", 0.8)])
def test_few_rows_are_few_bytes(machines: tuple[int, ...], codec: str, most: float) -> None:
    plain = exchange(machines, codec, few_rows, suppresses=False)
    few = exchange(machines, codec, few_rows, suppresses=True)
    assert sum(put for *_, put in few) < most * sum(put for *_, put in plain)


@pytest.mark.parametrize("machines", [(1, 1), (2, 1)], ids=str)
def test_sums_return_complete_where_owners_may_return_parameters(
    machines: tuple[int, ...],
) -> None:
    plain = exchange(machines, "fp32", few_rows, suppresses=False, returns_parameters=True)
    few = exchange(machines, "fp32", few_rows, suppresses=True, returns_parameters=True)
    assert same_bits(few, plain)
    for (_, traffic, put), (*_, all_put) in zip(few, plain, strict=True):
        assert sum(sent for sent, _ in traffic) == put
        assert put < 0.6 * all_put or not put


def test_a_dense_gradient_costs_a_preamble_more() -> None:
    def dense(rank: int, step: int) -> Tensor:
        return torch.full((ROWS, WIDTH), rank + step + 1.0)

    plain = exchange((1, 1), "fp32", dense, suppresses=False)
    same = exchange((1, 1), "fp32", dense, suppresses=True)
    assert same_bits(same, plain)
    for (*_, one), (*_, other) in zip(same, plain, strict=True):
        assert one - other == STEPS * 2 * 64  # a contribution's and a sum's


WORDS, CLASSES = 2000, 5


class Words(nn.Module):
    """A table of many words before a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 12, padding_idx=0)
        self.out = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.words(x).mean(1))
        return y


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def decaying(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def penalised(world: Any, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """Take a step with a penalty on the whole table in half of the steps: a dense gradient."""
    loss = F.cross_entropy(model(x), y)
    if int(x.sum()) % 2:
        loss = loss + 1e-3 * model.words.weight.square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def training(make_optimizer: Callable[[nn.Module], Optimizer], **more: Any) -> Training:
    """Make a training with uneven shares, and batches smaller than the number of ranks."""
    torch.manual_seed(3)
    random = torch.Generator().manual_seed(4)
    batches = [
        (torch.randint(0, WORDS, (n, 4), generator=random), torch.arange(n) % CLASSES)
        for n in (9, 2, 7, 1, 10, 9, 2, 5)
    ]
    return Training(Words(), make_optimizer, batches, **more)


def trained(
    work: Training, machines: tuple[int, ...], tables: Sequence[str], **more: Any
) -> list[State]:
    kind = notified(True, machines, tables=tables, **more)
    return work.on_threads(sum(machines), 2**16, kind)


@pytest.mark.parametrize("machines", [(1, 1), (1, 1, 1), (2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("make_optimizer", [momentum, decaying, adam])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_a_training_has_the_same_bits(
    machines: tuple[int, ...], make_optimizer: Callable[[nn.Module], Optimizer], wire: str
) -> None:
    work = training(make_optimizer)
    dense = trained(work, machines, (), codec=wire)
    few = trained(work, machines, ("words.weight",), codec=wire)
    for state in (*dense[1:], *few):
        for name, value in state.items():
            assert torch.equal(bits(value), bits(dense[0][name])), name


@pytest.mark.parametrize(
    "more", [{"staged": True}, {"intra_machine": in_threads}], ids=["staged", "summed"]
)
def test_a_training_with_staged_or_summed_gradients_has_the_same_bits(more: dict[str, Any]) -> None:
    work = training(momentum, make_step=lambda: penalised)
    dense = trained(work, (2, 1), (), codec="bf16", **more)
    few = trained(work, (2, 1), ("words.weight",), codec="bf16", **more)
    for name, value in few[0].items():
        assert torch.equal(bits(value), bits(dense[0][name])), name


def test_a_training_with_a_penalty_on_the_table_has_the_same_bits() -> None:
    work = training(adam, make_step=lambda: penalised)
    dense, few = (trained(work, (1, 1), tables) for tables in ((), ("words.weight",)))
    for name, value in few[0].items():
        assert torch.equal(bits(value), bits(dense[0][name])), name


@pytest.mark.parametrize("machines", [(1, 1), (1, 1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_a_sharded_training_has_the_same_bits(machines: tuple[int, ...], wire: str) -> None:
    work = training(adam, make_step=lambda: penalised)
    dense = trained(work, machines, (), codec=wire, kind=make_sharded)
    few = trained(work, machines, ("words.weight",), codec=wire, kind=make_sharded)
    for state in (*dense[1:], *few):
        for name, value in state.items():
            assert torch.equal(bits(value), bits(dense[0][name])), name
