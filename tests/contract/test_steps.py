"""Steps on several ranks: what they hear, where they stop, what is saved, what they draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
import torch

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.notified import make_notified
from paceline.algorithms.sharded import make_sharded
from paceline.comm.communicator import Communicator
from paceline.comm.peer_activities import PeerActivities
from paceline.data.batch_slice import BatchSlice
from paceline.data.order import Order
from paceline.errors import ConfigError, PeerLost
from paceline.generation.summaries import StepSummary
from paceline.recorder import MemberRecorder, NullRecorder
from paceline.run.extension import Extension
from paceline.run.steps import Steps, Stop
from paceline.run.straggler import RanksApart, Straggler
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.position import Position
from paceline.snapshots.schedule import SavePolicy
from paceline.snapshots.step_snapshots import StepSnapshots
from paceline.state.checkpoint_files import Checkpoints, read_checkpoint
from paceline.state.checkpoint_writer import CheckpointWriter
from paceline.state.state_copy import copy_state
from paceline.timeline.timeline import Timeline
from tests.harness.equivalence.large_batch import convnet
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.put_synchronizers import notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.served_synchronizers import Served
from tests.harness.equivalence.steps_by_hand import run_step
from tests.harness.membership.given_membership import GivenMembership
from tests.harness.processes.worlds import run_of

ORDER = Order(size=40, batch_size=12)  # 4 steps an epoch, the last one short


class Lines(NullRecorder):
    """Keeps the events."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, **fields: object) -> None:
        self.lines.append((name, fields))


class Rank(Extension):
    """One rank's steps over a small model, which hears each step's sums."""

    def __init__(self, communicator: Communicator, folder: Path, **options: Any) -> None:
        torch.manual_seed(1)
        model = options.get("model", convnet())
        self.bench = Bench.of(communicator, model, kind=options.get("kind", make_allreduce))
        self.communicator = communicator
        self.recorder = Lines()
        self.heard: list[tuple[int, tuple[float, ...]]] = []
        self.requests: set[int] = options.get("stop_in", set())
        self.number = 0
        objects = StateObjects(
            model=self.bench.model,
            optimizer=self.bench.optimizer,
            local_buffers=options.get("local_buffers", False),
        )
        timeline = options.get("timeline")
        run = run_of(communicator, None, self.recorder, timeline=timeline)
        snapshots = StepSnapshots(
            run,
            self.bench.replica,
            objects,
            enabled=options.get("snapshots", True),
            check=options.get("check", True),
        )
        writer = CheckpointWriter(Checkpoints(folder, 9), constant={}, membership=run.membership)
        self.apart = RanksApart(run, self.bench.replica, measured=False)
        self.steps = Steps(
            self.bench.replica,
            run,
            writer if communicator.rank == 0 else None,
            seed=5,
            position=options.get("position", Position()),
            policy=options.get("policy", SavePolicy()),
            requests=self,
            snapshots=snapshots,
            extensions=[self, self.apart, *options.get("extensions", ())],
        )
        self.steps.sum_values(2)

    @property
    def status(self) -> int:
        """The exit status that a signal asks for in the present step."""
        return 143 if self.number in self.requests else 0

    def receive(self, summary: StepSummary, row: Sequence[float]) -> None:
        """Note the sums of a step."""
        self.heard.append((summary.step, summary.sums))

    def place(self, number: int) -> BatchSlice:
        epoch, step = divmod(number, ORDER.steps)
        return ORDER.place(epoch, step, self.communicator.rank, self.communicator.world_size)

    def train(self, number: int) -> torch.Tensor:
        """Run a step; return a number that it drew."""
        self.number = number
        with run_step(self.steps, self.place(number)) as sums:
            drawn = torch.rand(1)
            sums[0] = 10.0**self.communicator.rank
            sums[1] = number
            self.bench.backward(number % 4)
            self.bench.optimizer.step()
            self.bench.optimizer.zero_grad()
        return drawn


def until_stopped(rank: Rank, numbers: range = range(20)) -> int:
    """Train; return the number of the step that didn't run."""
    for number in numbers:
        try:
            rank.train(number)
        except Stop:
            return number
    return numbers.stop


class Looked(Extension):
    """What looks at the first two steps of each generation, and notes what it gets and when."""

    def __init__(self) -> None:
        self.left = 0
        self.begun = 0
        self.received: list[tuple[int, Sequence[float]]] = []
        self.acted: list[tuple[int, int, Sequence[float]]] = []

    def begin_generation(self) -> None:
        self.left = 2

    def begin_step(self, number: int) -> None:
        self.left -= 1
        self.begun = number

    def row(self, batch: BatchSlice) -> list[float]:
        return [1.0, batch.number] if self.left >= 0 else []

    def receive(self, summary: StepSummary, row: Sequence[float]) -> None:
        self.received.append((summary.step, row))

    def act(self, summary: StepSummary, row: Sequence[float]) -> None:
        self.acted.append((summary.step, self.begun, row))


class Entered(Timeline, PeerActivities):
    """Keeps what a step has entered, and not left yet."""

    def __init__(self) -> None:
        Timeline.__init__(self)
        PeerActivities.__init__(self)
        self.entered: list[str] = []
        self.done: list[bool] = []

    @contextmanager
    def span(self, name: str, **fields: object) -> Iterator[None]:  # type: ignore[override]
        self.entered.append(name)
        try:
            yield
        finally:
            self.entered.remove(name)

    def begin_step(self, number: int) -> None:
        self.entered.append("activity")

    def end_step(self, *, done: bool) -> None:
        self.entered.remove("activity")
        self.done.append(done)


@pytest.mark.parametrize("in_begin", [True, False])
def test_a_step_that_an_error_ends_leaves_its_spans_and_its_activity(
    in_begin: bool, tmp_path: Path
) -> None:
    def on_rank(communicator: Communicator) -> tuple[list[str], list[bool]]:
        rank = Rank(communicator, tmp_path, stop_in={1} if in_begin else set())
        run = rank.steps.run
        run.context.timeline = run.context.activities = seen = Entered()
        rank.train(0)
        rank.number = 1

        def train() -> None:
            rank.steps.begin(rank.place(1))
            assert {"step", "train", "activity"} <= set(seen.entered)
            raise KeyError

        with pytest.raises(Stop if in_begin else KeyError):
            rank.steps.run_generations(train)
        return seen.entered, seen.done

    assert run_ranks(1, on_rank) == [([], [True, False])]


def test_an_extension_gets_the_sum_of_all_rows_and_acts_on_it_where_others_do(
    tmp_path: Path,
) -> None:
    """Of the first steps of each generation, on all ranks: summaries are of one length."""

    def work(communicator: Communicator) -> Looked:
        looked = Looked()
        rank = Rank(communicator, tmp_path, extensions=[looked])
        for number in range(8):
            if number == 5:
                rank.steps.end_steps()
                rank.steps.begin_generation(saved=False)
            rank.train(number)
        rank.steps.end_steps()
        return looked

    rows = [(2.0, 2.0 * step) if step in (0, 1, 5, 6) else () for step in range(8)]
    acted_in = [2, 3, 4, 4, 4, 7, 7, 7]
    for looked in run_ranks(2, work):
        assert looked.received == list(enumerate(rows))
        assert looked.acted == list(zip(range(8), acted_in, rows, strict=True))


def test_the_extension_of_the_documents_finds_the_peak_of_all_ranks(tmp_path: Path) -> None:
    page = Path(__file__, "../../../docs/inside/extend.md").resolve().read_text()
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)

    def work(communicator: Communicator) -> object:
        made = names["PeakMemory"](run_of(communicator))
        rank = Rank(communicator, tmp_path, extensions=[made])
        for number in range(3):
            rank.train(number)
        rank.steps.end_steps()
        return rank.steps.epoch_fields()["peak_memory"]

    before = getrusage(RUSAGE_SELF).ru_maxrss / 1000
    one, other = run_ranks(2, work)
    assert before <= one == other <= getrusage(RUSAGE_SELF).ru_maxrss / 1000


def test_each_rank_hears_the_sum_over_all_one_step_later(tmp_path: Path) -> None:
    def work(communicator: Communicator) -> list[int]:
        rank = Rank(communicator, tmp_path)
        late = []
        for number in range(4):
            rank.train(number)
            late.append(number - len(rank.heard))
        assert rank.steps.end_steps() == [4 * 111.0, 3 * 6.0]
        assert rank.heard == [(number, (111.0, 3.0 * number)) for number in range(4)]
        return late

    for late in run_ranks(3, work)[1:]:  # rank 0 hears earlier where it takes a snapshot
        assert late == [0, 1, 1, 1]


@pytest.mark.parametrize(
    "requests", [{1: {3}}, {0: {3}}, {0: {3}, 2: {3}}, {0: {4}, 1: {3}, 2: {4, 5}}, {2: {0}}]
)
def test_all_ranks_stop_at_the_same_boundary(tmp_path: Path, requests: dict[int, set[int]]) -> None:
    def work(communicator: Communicator) -> int:
        stop_in = requests.get(communicator.rank, set())
        return until_stopped(Rank(communicator, tmp_path, stop_in=stop_in))

    first = min(min(steps) for steps in requests.values())
    assert run_ranks(3, work) == [first + 2] * 3
    saved = read_checkpoint(tmp_path / "checkpoints" / f"step-{first + 2:08}.pt")
    assert saved["position"]["number"] == first + 2


def test_a_rank_alone_stops_before_the_next_step(tmp_path: Path) -> None:
    assert run_ranks(1, lambda c: until_stopped(Rank(c, tmp_path, stop_in={3}))) == [3]
    assert (tmp_path / "checkpoints/step-00000003.pt").exists()


def test_a_rank_that_saves_by_itself_stops_with_the_others(tmp_path: Path) -> None:
    """It has heard of the wish a step before them."""

    def work(communicator: Communicator) -> int:
        rank = Rank(communicator, tmp_path, stop_in={3} if communicator.rank else set())
        for number in range(4):
            rank.train(number)
        if communicator.rank == 0:
            rank.steps.save(together=False)
        return until_stopped(rank, range(4, 8))

    assert run_ranks(2, work) == [5, 5]


def test_a_wish_in_an_epochs_last_step_is_heard_at_its_end(tmp_path: Path) -> None:
    def work(communicator: Communicator) -> None:
        rank = Rank(communicator, tmp_path, stop_in={3} if communicator.rank else set())
        for number in range(4):
            rank.train(number)
        with pytest.raises(Stop):
            rank.steps.end_steps()

    run_ranks(2, work)
    position = read_checkpoint(tmp_path / "checkpoints" / "step-00000004.pt")["position"]
    assert (position["epoch"], position["step"]) == (0, 4)
    assert position["sums"] == [4 * 11.0, 2 * 6.0]


def test_the_best_checkpoint_is_the_first_of_the_most_accurate(tmp_path: Path) -> None:
    def work(communicator: Communicator) -> None:
        rank = Rank(communicator, tmp_path)
        for epoch, accuracy in enumerate((0.4, 0.5, 0.5, 0.3)):
            for step in range(4):
                rank.train(4 * epoch + step)
            rank.steps.end_steps()
            rank.steps.end_epoch(accuracy)
        rank.steps.finish()

    run_ranks(1, work)
    assert read_checkpoint(tmp_path / "checkpoints" / "best.pt")["position"]["number"] == 8


def test_a_checkpoint_holds_the_result_of_the_step_before_it(tmp_path: Path) -> None:
    def work(communicator: Communicator) -> dict[int, list[torch.Tensor]]:
        rank = Rank(communicator, tmp_path, policy=SavePolicy(steps=2))
        weights = {}
        for number in range(7):
            rank.train(number)
            rank.bench.replica.settle()
            weights[number + 1] = rank.bench.weights()
        rank.steps.end_steps()
        rank.steps.finish()
        return weights

    weights = run_ranks(2, work)[1]
    for step in (2, 4, 6):
        saved = read_checkpoint(tmp_path / "checkpoints" / f"step-{step:08}.pt")
        for ours, theirs in zip(saved["model"].values(), weights[step], strict=True):
            assert torch.equal(ours, theirs)
        assert saved["position"]["sums"] == [11.0 * step, 2.0 * sum(range(step))]


@pytest.mark.parametrize("kind", [make_notified, make_sharded])
@pytest.mark.parametrize("policy", [{"steps": 3}, {"minutes": 1e-9}], ids=str)
def test_a_checkpoint_holds_what_all_ranks_have_before_its_step(
    tmp_path: Path, policy: dict[str, Any], kind: Any
) -> None:
    """Rank 0 alone has the clock, and the policy that counts."""
    model, make = convnet().float(), notified(False, (1, 1), "int8", kind)

    def work(communicator: Communicator) -> dict[int, Any]:
        own = SavePolicy(**policy) if communicator.rank == 0 else SavePolicy()
        rank = Rank(communicator, tmp_path, policy=own, model=model, kind=make)
        had = {}
        for number in range(8):
            rank.train(number)
            had[number + 1] = copy_state(rank.bench.replica.state())
        rank.steps.finish()
        rank.bench.replica.close()
        return had

    had = run_ranks(2, work)[0]
    saved = {s: read_checkpoint(f) for s, f in files(tmp_path).items()}
    assert sorted(saved) == ([3, 6] if "steps" in policy else [2, 4, 6])
    for step, applied in saved.items():
        if kind is make_sharded:
            momenta = [
                [entry["momentum_buffer"] for entry in state["optimizer"]["state"].values()]
                for state in (had[step], applied)
            ]
            assert len(momenta[0]) == len(list(model.parameters()))
            assert all(torch.equal(a, b) for a, b in zip(*momenta, strict=True))
        for ours, theirs in zip(had[step]["missed"], applied["exchange"]["missed"], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def files(folder: Path) -> dict[int, Path]:
    """Find the checkpoints by their steps."""
    found = (folder / "checkpoints").glob("step-*.pt")
    return {int(path.stem.removeprefix("step-")): path for path in found}


def test_the_lines_of_all_steps_are_there_before_their_checkpoint_is(tmp_path: Path) -> None:
    ranks: dict[int, Rank] = {}
    published: list[list[int]] = []

    class Watched(Checkpoints):
        def write(self, step: int, state: Any, **options: Any) -> Path:
            published.append(
                [sum(n == "step" for n, _ in r.recorder.lines) for r in ranks.values()]
            )
            return super().write(step, state, **options)

    def work(communicator: Communicator) -> None:
        rank = ranks[communicator.rank] = Rank(communicator, tmp_path, policy=SavePolicy(steps=1))
        if communicator.rank == 0:
            rank.steps._writer._checkpoints = Watched(tmp_path, 3)  # type: ignore[union-attr]
        for number in range(8):
            rank.train(number)
        rank.steps.finish()

    run_ranks(3, work)
    assert len(published) == 7
    for step, lines in enumerate(published, start=1):
        assert min(lines) >= step


def test_a_process_outside_the_world_reports_no_checkpoint_in_a_step_but_at_its_end(
    tmp_path: Path,
) -> None:
    def refuse() -> None:
        raise PeerLost("outside")

    def work(communicator: Communicator) -> list[int]:
        rank = Rank(communicator, tmp_path, policy=SavePolicy(steps=1))
        rank.train(0)
        rank.train(1)
        assert rank.steps._writer is not None
        rank.steps._writer.wait()
        rank.steps.run.recorder = MemberRecorder(
            rank.recorder, GivenMembership(require_member=refuse)
        )
        with pytest.raises(PeerLost):
            rank.train(2)
        assert "checkpoint" not in dict(rank.recorder.lines)
        rank.steps.rescue()
        saved = [fields for name, fields in rank.recorder.lines if name == "checkpoint"]
        return [fields["step"] for fields in saved]

    assert run_ranks(1, work) == [[1]]


def test_random_numbers_depend_on_seed_step_and_rank_only(tmp_path: Path) -> None:
    def draw(start: int) -> Callable[[Communicator], list[float]]:
        def work(communicator: Communicator) -> list[float]:
            rank = Rank(communicator, tmp_path, position=Position(number=start, step=start))
            return [float(rank.train(number)) for number in range(start, 4)]

        return work

    whole, resumed = run_ranks(1, draw(0))[0], run_ranks(1, draw(2))[0]
    assert whole[2:] == resumed
    assert len(set(whole)) == 4


@pytest.mark.parametrize(
    ("steps", "minutes", "number", "seconds", "due"),
    [
        (0, 0.0, 100, 1e9, False),
        (10, 0.0, 20, 0.0, True),
        (10, 0.0, 21, 1e9, False),
        (0, 5.0, 3, 299.0, False),
        (0, 5.0, 3, 300.0, True),
        (10, 5.0, 3, 300.0, True),
    ],
)
def test_a_checkpoint_is_due_by_steps_or_by_minutes(
    steps: int, minutes: float, number: int, seconds: float, due: bool
) -> None:
    policy = SavePolicy(steps=steps, minutes=minutes)
    assert (policy.due_by_steps(number) or policy.due_by_time(seconds)) is due


@pytest.mark.parametrize("zeroed", ["never", "every other step", "in place", "after the forward"])
def test_gradients_that_add_up_over_steps_are_refused_where_files_are_written(
    tmp_path: Path, zeroed: str
) -> None:
    """A resumed run would lack them."""

    def work(communicator: Communicator) -> str:
        rank = Rank(communicator, tmp_path)
        for number in range(4):
            try:
                with run_step(rank.steps, rank.place(number)):
                    loss = rank.bench.loss(number % 4)
                    if zeroed == "after the forward":
                        rank.bench.optimizer.zero_grad()
                    loss.backward()
                    rank.bench.optimizer.step()
            except ConfigError as error:
                return str(error)
            if zeroed == "in place" or (zeroed == "every other step" and number % 2):
                rank.bench.optimizer.zero_grad(set_to_none=zeroed != "in place")
        rank.steps.end_steps()
        return ""

    expected = zeroed in ("never", "every other step")
    for text in run_ranks(2, work):
        assert ("a backward in step 1 added to gradients of an earlier step" in text) is expected


class Computing:
    """Clock that passes by what its rank computes alone: no wait takes any time."""

    def __init__(self) -> None:
        self.nanoseconds = 0

    def __call__(self) -> int:
        return self.nanoseconds


HELD = (
    "rank 1 on machine 0 (a) held the others back for 8 s, 67% of the epoch; staleness hides "
    "unsteady speeds only: --shares measured gives it fewer samples."
)


@pytest.mark.parametrize("staleness", [2, None], ids=["bounded", "asynchronous"])
def test_an_epoch_of_stale_workers_names_the_rank_that_held_the_others_back(
    staleness: int | None, tmp_path: Path
) -> None:
    served = Served(1, staleness=staleness)

    def train(communicator: Communicator) -> list[object]:
        clock = Computing()
        rank = Rank(communicator, tmp_path, kind=served, snapshots=False, timeline=Timeline(clock))
        steps = rank.steps
        steps.run.context.allow_lead(2)
        found = []
        for seconds in ((1, 3), (1, 3), (2, 2)):  # by epoch: of a step, of each rank
            for number in range(steps.position.number, steps.position.number + ORDER.steps):
                rank.train(number)
                clock.nanoseconds += seconds[communicator.rank] * 10**9
            steps.end_steps()
            found.append(rank.apart.epoch_fields()["straggler"])
        notes = [fields["text"] for name, fields in rank.recorder.lines if name == "note"]
        assert notes == [HELD]  # once
        rank.bench.replica.close()
        return found

    for found in run_ranks(2, train):
        assert found == [Straggler(1, 8.0, 8 / 12), Straggler(1, 8.0, 8 / 12), None]
