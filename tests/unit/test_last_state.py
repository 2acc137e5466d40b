"""What the ends of a run's event files show, and how fast a run is at a moment."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.cli.active_run.status import describe, describe_last
from paceline.cluster.supervision.requests.run_status import MemberLoss, RunStatus
from paceline.observe.last_state import LastState, last_state, of_events
from paceline.observe.speed_recorder import SpeedRecorder


def step(number: int, generation: int = 0) -> dict[str, object]:
    return {"event": "step", "generation": generation, "step": number}


def test_the_newest_generation_counts() -> None:
    events = [
        *(step(number) for number in range(9)),
        {"event": "checkpoint", "generation": 0, "step": 4, "path": "x"},
        {"event": "end", "generation": 0},
        {"event": "restore", "generation": 1, "step": 5},
        step(5, 1),
        step(3),
    ]
    assert of_events(events) == LastState(generation=1, steps=6, checkpoint=4)
    assert of_events([]) == LastState()


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    lines = [json.dumps(step(number)) + "\n" for number in range(5000)]
    (tmp_path / "events.a-0.jsonl").write_text("".join(lines) + '{"event": "st')
    (tmp_path / "events.a-1.jsonl").write_text(json.dumps(step(5000)) + "\n")
    assert last_state(tmp_path) == LastState(generation=0, steps=5001)


def test_the_weights_of_a_run_whose_folder_was_moved_are_in_that_folder(tmp_path: Path) -> None:
    end = {"event": "end", "generation": 0, "weights": ["runs/a/net_model.pt"]}
    (tmp_path / "events.a-0.jsonl").write_text(json.dumps(end) + "\n")
    assert last_state(tmp_path).weights == ("runs/a/net_model.pt",)
    (tmp_path / "net_model.pt").touch()
    assert last_state(tmp_path).weights == (str(tmp_path / "net_model.pt"),)


def test_the_speed_is_that_of_the_last_seconds() -> None:
    now = 0.0
    speed = SpeedRecorder(lambda: now)
    assert speed.samples_per_second() is None
    for samples in (10, *[10] * 20, *[30] * 20):  # a step a second; the first one starts the clock
        speed.event("step", cuts=(4, 5, 4 + samples))
        now += 1.0
    now -= 1.0
    measured = speed.samples_per_second()
    assert measured is not None
    assert 28 <= measured <= 32
    speed.event("evaluate")
    now += 100.0
    speed.event("step", cuts=(0, 300))
    assert speed.samples_per_second() == 3.0


def test_a_status_is_said_with_its_losses() -> None:
    loss = MemberLoss(
        member="a-1", generation=2, cause="rank 1 was killed by SIGKILL.", seconds=1.26
    )
    status = RunStatus(generation=3, step=1200, samples_per_second=51.6, losses=(loss,))
    assert list(describe(Path("runs/r"), status)) == [
        "Run r is active: generation 3, 1,200 steps completed, 52 samples/s, 0 members.",
        "Lost from generation 2 (cost 1.3 s): rank 1 was killed by SIGKILL.",
    ]
    whole = RunStatus(generation=0, step=1200, total_steps=12_000)
    (line,) = describe(Path("runs/r"), whole)
    assert line == "Run r is active: generation 0, 1,200 of 12,000 steps completed, 0 members."


def test_the_last_state_is_said_as_far_as_it_is_known() -> None:
    run, state = Path("runs/r"), LastState(generation=3, steps=1200, checkpoint=1000)
    known = "Last known: generation 3, 1,200 steps; a checkpoint has 1,000 of them."
    assert describe_last(run, state, finished=False, here=0, hosts="") == (
        f"Run r isn't active on this machine. {known}"
    )
    assert "didn't answer" in describe_last(run, state, finished=False, here=2, hosts="")
    assert "are on far: repeat" in describe_last(run, state, finished=False, here=0, hosts="far")
    assert describe_last(run, state, finished=True, here=0, hosts="") == (
        "Run r is finished, after 1,200 steps in generation 3."
    )
    events = [
        {"event": "step", "generation": 0, "step": 11, "epoch": 1},
        {"event": "end", "generation": 0, "best": 0.5, "best_epoch": 1, "weights": ["r/a.pt"]},
    ]
    assert describe_last(run, of_events(events), finished=True, here=0, hosts="") == (
        "Run r is finished, after 12 steps in generation 0; best test accuracy 50.00% after "
        "epoch 2; weights: r/a.pt."
    )
    later = [*events, {"event": "step", "generation": 1, "step": 5}]
    assert of_events(later) == LastState(generation=1, steps=6)
    assert describe_last(run, LastState(), finished=False, here=0, hosts="").endswith(
        "No step of it is recorded."
    )


def test_of_all_members_counts_the_largest_is_the_cost() -> None:
    fields = {"gpu_hours": 0.0, "processor_kwh": None, "gpu_kwh": None, "price": None}
    counts = [
        {"event": "cost", "generation": 0, "processor_hours": hours, "machine_hours": 1.0, **fields}
        for hours in (1.0, 3.0, 2.0)
    ]
    cost = of_events(counts).cost
    assert cost is not None
    assert cost.processor_hours == 3.0
