"""Machines of a run are lost, or lose each other: one side continues, and the other one stops."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import pytest

from tests.harness.network.machine_runs import EPOCHS, STEPS, MachineRun
from tests.harness.network.redis_server import redis_server
from tests.harness.network.switched_machines import Switch, switched_machines
from tests.harness.processes.command import Result
from tests.harness.processes.run_folders import events, wait_until

FOLDER = ("--file_store_path", "../meet")
ALLREDUCE = ("--sync", "allreduce")
SHARDED = ("--sync", "notified", "--update", "sharded", "--bucket_mb", "0.0001")
REACHED = 13  # the leader has then saved two epochs
SAVED, SCRIPT_SAVED = "step-00000012.pt", "step-00000015.pt"  # the last ones before all wait
Contents = Mapping[str, tuple[bytes, int]]


@contextmanager
def started(
    folder: Path,
    switch: Switch,
    *words: str,
    workers: tuple[int, ...],
    peer_timeout: float = 2.0,
    output: str = "runs",
    script: bool = False,
) -> Iterator[MachineRun]:
    """Start a run inside the block, and let it reach its middle."""
    (folder / "meet").mkdir()
    run = MachineRun(
        folder,
        switch,
        *words,
        workers=workers,
        peer_timeout=peer_timeout,
        output=output,
        script=script,
    )
    try:
        run.reach(REACHED)
        saved = SCRIPT_SAVED if script else SAVED
        wait_until(lambda: saved in run.checkpoints(0))
        yield run
    finally:
        run.end()


@pytest.fixture
def pair() -> Iterator[Switch]:
    with switched_machines(2) as made:
        yield made


@pytest.fixture
def three() -> Iterator[Switch]:
    with switched_machines(3) as made:
        yield made


def master(switch: Switch) -> tuple[str, ...]:
    """Return the words of a rendezvous that can be no witness: machine 0 serves it."""
    return ("--master", f"{switch.machines[0].address}:29500")


@contextmanager
def redis_on(switch: Switch) -> Iterator[tuple[str, ...]]:
    """Run a Redis server at the switch; yields the words of the rendezvous there."""
    inside = ("ip", "netns", "exec", switch.name)
    with redis_server(address=switch.address, inside=inside) as url:
        yield ("--redis_url", url)


def casting(switch: Switch, machine: int) -> str:
    """Return what the run reports of the machine that has the casting vote of two."""
    return (
        f"The loss of machine {machine} ({switch.machines[machine].name}) would stop the run: it "
        "has the casting vote of 2 machines, because there is no witness (a shared folder, Redis "
        "or etcd)."
    )


def requires_exact(run: MachineRun, *machines: int) -> None:
    """Require that these machines' files prove that each sample was trained once."""
    proof = run.proof(*machines)
    assert proof.exact, proof.faults
    assert proof.done == STEPS * EPOCHS


def requires_stopped(
    run: MachineRun, machine: int, ended: Result, sentence: str, before: Contents
) -> None:
    """Require that a machine stopped with a sentence, once its newest state was on its disk.

    Args:
        run: the run.
        machine: has stopped.
        ended: its end.
        sentence: what its last line contains.
        before: the contents of its run folder before the loss.
    """
    assert ended.status == 1, ended.text
    assert sentence in ended.text.splitlines()[-1], ended.text
    assert "Traceback" not in ended.text
    (said,) = [line for line in ended.text.splitlines() if " is saved in runs/r" in line]
    step = newest(run, machine)
    assert f"the state after {step} steps" in said
    recorded = events(run.run_folder(machine), machine)
    assert all(event["generation"] == 0 for event in recorded if event["event"] == "step")
    now = run.contents(machine)
    written = {Path(path).name for path, content in now.items() if content != before.get(path)}
    written -= {path.name for path in run.run_folder(machine).glob("events.*.jsonl")}
    assert written <= {f"step-{step:08}.pt"}
    if written:
        assert (recorded[-1]["event"], recorded[-1].get("step")) == ("checkpoint", step)


def separated(run: MachineRun, pair: Switch) -> tuple[list[Contents], Mapping[int, Result]]:
    """Cut the link of two machines; return what their folders had before, and their ends."""
    before = [run.contents(machine) for machine in (0, 1)]
    pair.separate(0, 1)
    run.release()
    return before, {machine: run.wait(machine) for machine in (0, 1)}


def newest(run: MachineRun, machine: int) -> int:
    """Return the number of steps in the newest checkpoint of a machine."""
    return max(int(name[5:-3]) for name in run.checkpoints(machine))


def test_the_smaller_machine_continues_alone_where_a_folder_is_the_witness(
    pair: Switch, tmp_path: Path
) -> None:
    with started(tmp_path, pair, *FOLDER, *SHARDED, workers=(2, 1)) as run:
        run.kill(0)
        run.release()
        lost, ended = run.wait(0), run.wait(1)
    assert "The run continues after the loss of any one of its machines." in lost.text
    assert ended.status == 0, ended.text
    assert "1 process continues from step " in ended.text
    assert "would stop the run" not in ended.text
    requires_exact(run, 1)


def test_without_a_witness_the_run_stops_with_the_casting_machine_and_resumes(
    pair: Switch, tmp_path: Path
) -> None:
    with started(tmp_path, pair, *master(pair), *ALLREDUCE, workers=(1, 1)) as run:
        assert run.checkpoints(1) == set()
        before = run.contents(1)
        run.kill(0)
        run.release()
        lost, ended = run.wait(0), run.wait(1)
        assert casting(pair, 0) in lost.text
        requires_stopped(run, 1, ended, "it reaches 1 of 2 machines, which doesn't suffice", before)
        (name,) = run.checkpoints(1)
        (run.run_folder(0) / "checkpoints" / name).unlink(missing_ok=True)
        again = run.again()
    assert [each.status for each in again] == [0, 0], again
    place = f"on machine 1 ({pair.machines[1].name})"
    assert f"Resuming from runs/r/checkpoints/{name} {place}: " in again[0].text
    requires_exact(run, 0, 1)


@pytest.mark.parametrize("witness", ["none", "redis"])
def test_of_two_machines_that_lose_each_other_one_continues(
    pair: Switch, tmp_path: Path, witness: str
) -> None:
    words = redis_on(pair) if witness == "redis" else nullcontext(master(pair))
    with words as given, started(tmp_path, pair, *given, *ALLREDUCE, workers=(1, 1)) as run:
        before, ends = separated(run, pair)
    winner = next(machine for machine, end in ends.items() if end.status == 0)
    loser = 1 - winner
    assert witness == "redis" or winner == 0
    requires_exact(run, winner)
    sentence = "it reaches 1 of 2 machines, which doesn't suffice to decide ("
    if witness == "redis":
        sentence = f"has lost machine {winner}, where the run continues without it."
    requires_stopped(run, loser, ends[loser], sentence, before[loser])
    continues = "and the run continues on other machines." in ends[loser].text
    assert continues == (witness == "redis")
    assert continues != ("the same command resumes it" in ends[loser].text)


def test_a_script_that_loses_its_machines_saves_what_it_has(pair: Switch, tmp_path: Path) -> None:
    with (
        redis_on(pair) as given,
        started(tmp_path, pair, *given, workers=(1, 1), script=True) as run,
    ):
        before, ends = separated(run, pair)
    winner = next(machine for machine, end in ends.items() if end.status == 0)
    loser = 1 - winner
    proof = run.proof(winner)
    assert proof.exact, proof.faults
    sentence = f"has lost machine {winner}, where the run continues without it."
    requires_stopped(run, loser, ends[loser], sentence, before[loser])
    assert "and the run continues on other machines." in ends[loser].text


def test_two_of_three_machines_continue_without_the_leaders(three: Switch, tmp_path: Path) -> None:
    with started(tmp_path, three, *master(three), *SHARDED, workers=(1, 1, 1)) as run:
        before = run.contents(0)
        three.unplug(0)
        run.release()
        stopped = run.wait(0)
        after = run.contents(0)
        three.plug(0)
        ends = [run.wait(machine) for machine in (1, 2)]
    assert [end.status for end in ends] == [0, 0], ends
    assert not any("cleaned up" in end.text for end in ends), ends
    assert "The run continues after the loss of any one of its machines." in stopped.text
    assert casting(three, 1) in ends[0].text
    requires_exact(run, 1, 2)
    requires_stopped(run, 0, stopped, "it reaches 1 of 3 machines, which doesn't suffice", before)
    assert run.contents(0) == after


def test_a_link_that_is_cut_alone_is_reported_as_that(three: Switch, tmp_path: Path) -> None:
    with started(tmp_path, three, *FOLDER, *ALLREDUCE, workers=(1, 1, 1)) as run:
        three.separate(1, 2)
        run.release()
        ends = [run.wait(machine) for machine in (0, 1, 2)]
    assert sorted(end.status for end in ends) == [0, 0, 1], ends
    lost = next(machine for machine, end in enumerate(ends) if end.status == 1)
    assert re.search(
        rf"the link between rank {lost} .* is cut, and the others continue", ends[0].text
    )
    requires_exact(run, *({0, 1, 2} - {lost}))


def test_a_short_silence_changes_nothing(pair: Switch, tmp_path: Path) -> None:
    with started(tmp_path, pair, *FOLDER, *SHARDED, workers=(1, 1), peer_timeout=60.0) as run:
        pair.unplug(1)
        run.release()
        run.stand_still()
        pair.plug(1)
        stopped = run.processes(1)
        for process in stopped:
            process.suspend()
        wait_until(lambda: all(each.status() == psutil.STATUS_STOPPED for each in stopped))
        for process in stopped:
            process.resume()
        ends = [run.wait(machine) for machine in (0, 1)]
    assert [end.status for end in ends] == [0, 0], ends
    assert "continue from step" not in ends[0].text
    assert all(event["generation"] == 0 for event in events(run.run_folder(0)) if "step" in event)
    requires_exact(run, 0, 1)


@pytest.mark.parametrize("supervised", [False, True], ids=["machine", "worker"])
def test_an_expelled_leader_that_wakes_up_writes_nothing(
    pair: Switch, tmp_path: Path, supervised: bool
) -> None:
    words = (*FOLDER, *SHARDED)
    with started(tmp_path, pair, *words, workers=(1, 1), output="../shared") as run:
        stopped = run.processes(0, supervised=supervised)
        for process in stopped:
            process.suspend()
        run.release()
        continued = run.wait(1)
        before = run.contents(0)
        for process in stopped:
            process.resume()
        woken = run.wait(0)
    assert continued.status == 0, continued.text
    requires_exact(run, 1)
    assert woken.status == 1, woken.text
    assert "continue without it" in woken.text.splitlines()[-1]
    assert "is saved in" not in woken.text
    assert run.contents(0).items() <= before.items()  # it removes its marks of a run that is active
