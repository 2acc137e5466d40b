"""Mistakes that a script's first steps show: the same samples on several ranks, other means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.communicator import Communicator
from paceline.data.order import Order
from paceline.recorder import NullRecorder
from paceline.replica.input_checksum import InputChecksum
from paceline.run.first_step_checks import STEPS, FirstStepChecks
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.processes.worlds import run_of

ORDER = Order(size=1_000, batch_size=24)
Batch = Callable[[int, int], tuple[Tensor, Tensor]]  # of (rank, step): inputs, labels


class Notes(NullRecorder):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.texts: list[Any] = []

    def event(self, name: str, **fields: object) -> None:
        if name == "note":
            self.texts.append(fields["text"])


def train(
    communicator: Communicator,
    batch: Batch,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    *,
    steps: int = 6,
    divided: bool = False,
    model: Any = None,
    basis: str = "",
) -> list[str]:
    """Make steps, as `Steps` does; return what is reported."""
    notes = Notes()
    run = run_of(communicator, recorder=notes)
    module = model() if model else nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    first = FirstStepChecks(run, [module], gpu=False, averaged=False)
    first.divided = divided
    summaries = run.context.summaries
    for number in range(steps):
        for summary in summaries.receive(before=number - 1):
            first.receive(summary, summary.rows[0])
        place = ORDER.place(0, number, communicator.rank, communicator.world_size)
        first.begin_step(number)
        x, y = batch(communicator.rank, number)
        loss(module(x), y).backward()
        row = first.row(replace(place, basis=basis))
        summaries.send(number, torch.zeros(0).double(), stop=False, rows=[row])
    for summary in summaries.receive(before=steps):
        first.receive(summary, summary.rows[0])
    first.close()
    return notes.texts


def seeded(seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=random), torch.randint(0, 3, (8,), generator=random)


def others(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Other samples on each rank."""
    return seeded(10 * rank + step)


def reports(batch: Batch, world_size: int = 3, **options: Any) -> list[str]:
    found = run_ranks(world_size, lambda c: train(c, batch, **options))
    assert not any(found[1:])  # rank 0 alone reports
    return found[0]


def test_ranks_with_the_same_batches_are_reported_once() -> None:
    (said,) = reports(lambda rank, step: seeded(step))
    assert said.startswith("all ranks train the same samples: ")
    assert "paceline.loader()" in said


def test_some_ranks_with_the_same_batches_are_named() -> None:
    (said,) = reports(lambda rank, step: seeded(100 * (rank // 2) + step), 4)
    assert said.startswith("ranks 0 and 1 train the same samples")


@pytest.mark.parametrize(
    "batch",
    [
        lambda rank, step: seeded(10 * rank + step),
        lambda rank, step: (torch.zeros(8, 4), seeded(step)[1]),
        lambda rank, step: seeded(0),  # one batch for ever, as in a benchmark
        lambda rank, step: (seeded(step + (step == 1) * (rank + 7)))[:2],
        lambda rank, step: (seeded(step)[0][:1, :1].expand(1, 4) * 0 + step, seeded(step)[1][:1]),
    ],
    ids=["others", "zeros", "one batch", "once another", "constants"],
)
def test_other_batches_and_constants_are_not_reported(batch: Batch) -> None:
    assert reports(batch) == []


def augmented(step: int, noise: int, *, classes: int = 10) -> tuple[Tensor, Tensor]:
    """16 samples, the same in each step but for a transform that draws at random."""
    random = torch.Generator().manual_seed(step)
    x = torch.randn(16, 4, generator=random)
    y = torch.randint(0, classes, (16,), generator=random)
    return x + 0.1 * torch.randn(16, 4, generator=torch.Generator().manual_seed(noise)), y


def wide() -> nn.Module:
    return nn.Linear(4, 10)


@pytest.mark.parametrize("regression", [False, True])
def test_the_same_samples_that_are_augmented_at_random_are_reported(regression: bool) -> None:
    """All ranks seed torch alike, which lasts for the first batch; a step seeds each rank anew."""

    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
        x, y = augmented(step, 99 + rank * step)
        return x, torch.eye(10)[y] if regression else y

    loss = F.mse_loss if regression else F.cross_entropy
    (said,) = reports(batch, model=wide, loss=loss)
    assert said.startswith(
        "all ranks train the same samples: their models got the same first inputs"
    )


@pytest.mark.parametrize(
    "batch",
    [
        lambda rank, step: augmented(step, 99 + rank),  # of a periodic order, say
        lambda rank, step: augmented(step, 99 + rank * step, classes=1),
        lambda rank, step: (augmented(step, 99 + rank * step)[0], augmented(0, 0)[1]),
        lambda rank, step: (augmented(step, 99 + rank * step)[0], augmented(step + rank, 0)[1]),
        lambda rank, step: tuple(one[:3] for one in augmented(step, 99 + rank * step, classes=2)),
    ],
    ids=["other inputs", "one class", "one batch", "other targets", "few"],
)
def test_targets_that_may_be_equal_are_not_reported(batch: Batch) -> None:
    assert reports(batch, model=wide) == []


def test_batches_that_a_loader_divides_are_not_compared() -> None:
    assert reports(lambda rank, step: seeded(step), divided=True) == []


def test_rows_are_of_one_length_where_a_rank_was_away_for_the_first_steps() -> None:
    def on_rank(communicator: Communicator) -> list[int]:
        run = run_of(communicator)
        model = nn.Linear(4, 3)
        first = FirstStepChecks(run, [model], gpu=False, averaged=False)
        away = communicator.rank == 1
        lengths = []
        for numbers in (range(4 if away else STEPS + 2), range(STEPS + 2, 2 * STEPS + 4)):
            first.begin_generation()
            for number in numbers:
                place = ORDER.place(0, number, communicator.rank, communicator.world_size)
                first.begin_step(number)
                F.cross_entropy(model(torch.randn(8, 4)), torch.zeros(8).long()).backward()
                lengths.append(len(first.row(place)))
        first.close()
        return lengths[-(STEPS + 2) :]

    one, other = run_ranks(2, on_rank)
    assert one == other
    assert one == [8] * STEPS + [0, 0]


def test_rows_are_of_one_length_where_a_rank_has_left_out_a_step() -> None:
    def on_rank(communicator: Communicator) -> list[int]:
        first = FirstStepChecks(run_of(communicator), [], gpu=False, averaged=False)
        lengths = []
        for number in range(STEPS + 2):
            later = number + (communicator.rank == 1 and number >= STEPS - 1)
            first.begin_step(later)
            place = ORDER.place(0, later, communicator.rank, communicator.world_size)
            lengths.append(len(first.row(place)))
        first.close()
        return lengths

    one, other = run_ranks(2, on_rank)
    assert one == other


class Named(nn.Module):
    """A model whose inputs are named, and of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 3)

    def forward(self, batch: dict[str, Any], *, scale: float = 1.0) -> Tensor:
        rows: Tensor = self.table(batch["ids"]).sum(1)
        return rows * scale


class Wrapped(nn.Module):
    """A loop's module that gives the model a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Named()

    def forward(self, x: Tensor) -> Tensor:
        ids = (x * 10).long().abs() % 50
        logits: Tensor = self.inner({"ids": ids, "names": ["a"]}, scale=2.0)
        return logits


@pytest.mark.parametrize("same", [False, True])
def test_inputs_of_any_form_are_compared(same: bool) -> None:
    said = reports(lambda rank, step: seeded(step if same else 10 * rank + step), model=Wrapped)
    assert len(said) == same


class Method(Wrapped):
    """A model that is called by a method, or with an object of the script's own."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


class Holder:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch: Holder | Tensor) -> Tensor:
        if isinstance(batch, Tensor):
            return torch.as_tensor(nn.Module.__call__(self, Holder(batch)))
        return torch.as_tensor(self.layer(batch.x))

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


@pytest.mark.parametrize("model", [Method, Held])
@pytest.mark.parametrize("same", [False, True])
def test_inputs_of_layers_are_compared_where_the_model_gets_none(model: Any, same: bool) -> None:
    """As in Lightning's training_step, and with the batches of torch_geometric."""
    said = reports(lambda rank, step: seeded(step if same else 10 * rank + step), model=model)
    assert len(said) == same


class Prototypes(nn.Module):
    """A model whose first layer is given what follows from its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
        self.layer = nn.Linear(4, 4)

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.classes.mul_(0.9)
        return x @ torch.as_tensor(self.layer(self.classes)).T


def test_parameters_are_no_samples() -> None:
    assert reports(others, model=Prototypes) == []


def ignoring(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """A batch of which rank 1 ignores half of the labels."""
    x, y = seeded(10 * rank + step)
    y[: 4 * (rank == 1)] = -100
    return x, y


CLASSES = torch.tensor([1.0, 5.0, 0.2])


def masked(how: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A mean over the samples of label 0, in one of the ways in which it is written."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        mask, errors = y == 0, x.sum(1).square()
        if how == "index":
            return errors[mask].mean()
        if how == "mse":
            return F.mse_loss(x.sum(1)[mask], torch.zeros(int(mask.sum())))
        if how == "number":
            return (errors * mask).sum() / max(1, int(mask.sum())) / 4
        if how == "nanmean":
            return 0.5 * torch.where(mask, errors, torch.nan).nanmean()
        return -(-errors * mask).sum() / mask.sum()

    return loss


def own_samples(x: Tensor, y: Tensor) -> Tensor:
    """Terms that all are means over this rank's samples, or depend on none."""
    terms = torch.stack([F.mse_loss(x, x.detach() + 1), x.square().sum() / len(x)])
    return terms.sum() + 0.1 * x.new_ones(5, requires_grad=True).square().sum()


@pytest.mark.parametrize(
    ("batch", "loss", "found"),
    [
        (ignoring, F.cross_entropy, True),
        (ignoring, lambda x, y: 0.5 * F.nll_loss(x.log_softmax(1), y) + x.mean(), True),
        (ignoring, lambda x, y: F.cross_entropy(x, y, reduction="sum") / 8, False),
        (
            lambda rank, step: seeded(10 * rank + step),
            lambda x, y: F.cross_entropy(x, y, weight=CLASSES),
            True,
        ),
        (lambda rank, step: seeded(10 * rank + step), F.cross_entropy, False),
        (
            lambda rank, step: ignoring(1, 10 * rank + step),  # half of them on all ranks
            F.cross_entropy,
            False,
        ),
        (others, masked("divided"), True),
        (others, masked("index"), True),
        (others, masked("mse"), True),
        (others, masked("number"), True),
        (others, masked("nanmean"), True),
        (others, own_samples, False),
    ],
    ids=[
        *("ignore_index", "a part of it", "sum", "class weights", "samples", "as many"),
        *("mask", "index", "mse_loss", "number", "nanmean", "own samples"),
    ],
)
def test_a_mean_of_unequal_numbers_of_labels_is_reported(
    batch: Batch, loss: Any, found: bool
) -> None:
    said = reports(batch, loss=loss)
    assert len(said) == found
    assert all("world.step(weight=n)" in one for one in said)


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda x, y: F.mse_loss(x, x.detach() + 1, reduction="sum"), True),
        (lambda x, y: x.square().sum() + 2 * x.sum(), True),
        (lambda x, y: F.cross_entropy(x, y, reduction="sum") / 24, True),  # the global batch
        (lambda x, y: x.square().sum() / 100, False),
        (lambda x, y: 3 / 24 * x.square().sum(), False),  # a script may know of the ranks
        (lambda x, y: torch.stack([*x.square().mean(1)]).sum(), False),
    ],
    ids=["mse_loss", "sums", "global batch", "constant", "ranks", "of losses"],
)
def test_a_sum_is_reported(loss: Any, found: bool) -> None:
    """As in the VAE of pytorch/examples, whose losses are sums."""
    said = reports(others, loss=loss)
    assert len(said) == found
    assert all("Divide the sum by the number of this rank's samples" in one for one in said)


def test_a_script_that_gives_the_weight_is_not_told() -> None:
    assert reports(ignoring, basis="weight") == []


def plainly(model: nn.Module) -> nn.Module:
    return model


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def around(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model, backend="eager")
    return compiled


@pytest.mark.parametrize("compiled", [plainly, in_place, around])
def test_a_compiled_models_inputs_have_the_same_checksum(compiled: Any) -> None:
    model = compiled(nn.Linear(4, 3))
    inputs = InputChecksum(model)
    found = []
    for number, x in enumerate((seeded(1)[0], seeded(1)[0], seeded(2)[0], torch.zeros(8, 4))):
        inputs.begin(number)
        model(x)
        model(x + 1)  # the first forward counts
        found.append(inputs.take(number))
    inputs.close()
    model(x)
    same, again, other, zeros = found
    assert same == again
    assert same[0] not in (0, other[0])
    assert same[1] == 32
    assert zeros[0] == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3, 9, 9).to(memory_format=torch.channels_last),
        torch.randn(300, 400),  # more than are looked at
        torch.randn(5, 6).bfloat16(),
        torch.randn(5, 6, dtype=torch.complex64),
        torch.rand(40, 2) > 0.5,
        torch.randint(0, 256, (7, 9), dtype=torch.uint8),
        torch.randn(6, 5).t(),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_inputs_of_any_type_and_layout_have_a_checksum(tensor: Tensor) -> None:
    model = nn.Identity()
    inputs = InputChecksum(model)
    found = []
    for number, x in enumerate((tensor, tensor.clone(), tensor.flip(0))):
        inputs.begin(number)
        model(x)
        found.append(inputs.take(number)[0])
    inputs.close()
    assert found[0] == found[1] != found[2]
    assert 0 < found[0] < 2**40
