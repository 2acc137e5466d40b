"""What lives how long: only a generation's context, and what it makes, keeps ranks and connections.

An object that outlives a generation finds these values through the run, at each use. Otherwise it
would go on with those of a world that is no more. The test looks at what is assigned to attributes:
its name, its annotation, and the parameter or attribute that it comes from.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "paceline"

NAMES = {
    *("rank", "ranks", "world_size", "local_rank", "local_world_size"),
    *("peers", "members", "group", "generation", "communicator"),
}
TYPES = {
    *("Member", "Generation", "Group", "Communicator", "StepSummaries"),
    *("Joined", "FormedWorld", "FormedRun"),  # which hold a group or a generation
}

# A generation's context, and the packages whose objects are made anew with it.
PER_GENERATION = (
    "algorithms/",
    "comm/",
    "reduce/",
    "generation/context.py",
    "generation/gathered_addresses.py",
    "generation/summaries.py",
    "parallel/link.py",  # a pipeline makes another one for each context
    "cluster/membership/voting/",  # messages and states of one vote
)

_LAUNCHER = "what a launcher or supervisor says of a process, before there is a world"
_READ = "a record that was read from a file"
_STATUS = "a report of one moment"
_VOTED = "the newest generation that is decided: what the membership is about"
_WORLD = "the world that a rendezvous forms, from which the first context is made"

ALLOWED = {
    "cluster/environment.py WorkerEnvironment.local_rank": _LAUNCHER,
    "cluster/launchers/launched_process.py LaunchedProcess.local_rank": _LAUNCHER,
    "cluster/launchers/launched_process.py LaunchedProcess.local_world_size": _LAUNCHER,
    "cluster/launchers/launched_process.py LaunchedProcess.rank": _LAUNCHER,
    "cluster/launchers/launched_process.py LaunchedProcess.world_size": _LAUNCHER,
    "cluster/rendezvous/registration.py Registration.local_rank": _LAUNCHER,
    "cluster/rendezvous/registration.py Registration.rank": _LAUNCHER,
    "cluster/rendezvous/registration.py RunRecord.generation": "the id of a start",
    "cluster/join.py Joined.group": _WORLD,
    "cluster/rendezvous/process_rendezvous.py FormedWorld.group": _WORLD,
    "cluster/rendezvous/formed_run.py FormedRun.generation": _WORLD,
    "cluster/supervision/process_end.py LaunchedEnd._world": "the world that the process leaves",
    "cluster/supervision/machine_workers.py MachineWorkers._run": "the workers' first world",
    "api/script_process.py ScriptProcess.joined": _WORLD,
    "cluster/membership/generation.py Generation.members": "the value itself",
    "cluster/membership/generation.py Group.generation": "the value itself",
    "cluster/membership/generation.py Group.rank": "the value itself",
    "cluster/membership/generation.py Group.ranks": "the value itself",
    "cluster/membership/generation.py Member.local_rank": "the value itself",
    "cluster/membership/generation_waits.py Change.lost": "what is reported of a change",
    "cluster/membership/control_line/activities.py Activities._generation": _VOTED,
    "cluster/membership/elastic.py ElasticMembership._entered": "what the present results are of",
    "cluster/membership/elastic.py ElasticMembership._generation": _VOTED,
    "cluster/membership/protocol.py Successor.group": "decided, and then entered",
    "cluster/membership/voting_member.py VotingMember._generation": _VOTED,
    "cluster/membership/voting_member.py VotingMember._member": "its id and machine, which remain",
    "cluster/membership/ballots/vote.py Vote.generation": _VOTED,
    "cluster/supervision/machine_endpoint.py MachineEndpoint._generation": _VOTED,
    "cluster/membership/generation_waits.py Change.generation": _VOTED,
    "cluster/supervision/event_queue.py Exited.local_rank": "the supervisor's name of a worker",
    "cluster/supervision/requests/run_status.py MemberLoss.generation": _STATUS,
    "cluster/supervision/requests/run_status.py MemberStatus.rank": _STATUS,
    "cluster/supervision/requests/run_status.py RunStatus.generation": _STATUS,
    "cluster/supervision/requests/run_status.py RunStatus.members": _STATUS,
    "cluster/supervision/machine_endpoint.py WorkerExit.local_rank": "that name again",
    "cluster/supervision/worker_process.py WorkerProcess._local_rank": "that name again",
    "data/batch_slice.py BatchSlice.rank": "whose share it is, of one step",
    "errors.py PeerLost.rank": "what an error reports",
    "observe/console.py Console._world_size": "shown as the event `run` reports it",
    "observe/last_state.py LastState.generation": _READ,
    "state/checkpoint_parts.py CheckpointIndex.generation": _READ,
    "run/straggler.py Straggler.rank": _STATUS,
    "observe/loss_history.py LossHistory._newest": "what an event reported",
    "observe/ledger/faults.py Fault.generation": _READ,
    "observe/ledger/history.py GenerationRecords.members": _READ,
    "observe/ledger/history.py Stretch.generation": _READ,
    "observe/ledger/history.py Stretch.rank": _READ,
    "observe/ledger/periods.py Period.generation": _READ,
    "observe/ledger/proof.py GenerationAccount.members": _READ,
    "observe/ledger/reading.py History.members": _READ,
    "observe/ledger/reading.py _Start.generation": _READ,
    "observe/ledger/reading.py _Start.rank": _READ,
    "observe/ledger/reading.py _Start.world_size": _READ,
    "timeline/recorder_buffer.py RecorderBuffer.rank": "a record that one rank sends once",
    "run/decode_trial.py DecodeTrial._begun_in": "the token by which it finds a new generation",
    "session/resume/start.py Start.generation": "the number of a start's first generation",
}


def attributes(source: str) -> Iterator[str]:
    """Name the attributes that keep a rank, a group or a connection, as CLASS.ATTRIBUTE."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    if kept([name_of(statement.target)], statement.annotation):
                        yield f"{node.name}.{statement.target.id}"
                elif isinstance(statement, ast.FunctionDef):
                    yield from (f"{node.name}.{name}" for name in assigned(statement))


def assigned(function: ast.FunctionDef) -> Iterator[str]:
    """Name the attributes of `self` to which a method assigns such a value."""
    parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    annotations = {each.arg: each.annotation for each in parameters}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            pairs = [pair for target in node.targets for pair in matched(target, node.value)]
            annotation = None
        elif isinstance(node, ast.AnnAssign):
            pairs, annotation = [(node.target, node.value)], node.annotation
        else:
            continue
        for target, value in pairs:
            if isinstance(target, ast.Attribute) and name_of(target.value) == "self":
                given = annotations.get(value.id) if isinstance(value, ast.Name) else None
                if kept([name_of(target), name_of(value)], annotation or given):
                    yield target.attr


def matched(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr | None]]:
    """Pair the targets of an assignment with their values, as far as these are written out."""
    if not isinstance(target, ast.Tuple):
        return [(target, value)]
    values = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
    return list(zip(target.elts, values, strict=True))


def name_of(value: ast.AST | None) -> str:
    """Return the last name of `a` or `a.b.c`, without underscores around it."""
    if isinstance(value, ast.Attribute):
        return value.attr.strip("_")
    return value.id.strip("_") if isinstance(value, ast.Name) else ""


def kept(names: list[str], annotation: ast.expr | None) -> bool:
    """Return whether an attribute keeps what it must not; a function that returns it is fine."""
    types = {name_of(part) for part in ast.walk(annotation or ast.Constant(None))}
    return "Callable" not in types and bool(NAMES.intersection(names) or TYPES & types)


def test_only_a_generations_context_keeps_its_ranks_and_connections() -> None:
    found = {
        f"{path.relative_to(PACKAGE)} {name}"
        for path in PACKAGE.rglob("*.py")
        if not str(path.relative_to(PACKAGE)).startswith(PER_GENERATION)
        for name in attributes(path.read_text(encoding="utf-8"))
    }
    assert found - ALLOWED.keys() == set(), "ask the run's context at each use"
    assert ALLOWED.keys() - found == set(), "these exceptions are needed no longer"


@pytest.mark.parametrize(
    "line",
    [
        "self._rank = 0",
        "self.size, self._world_size = 1, 2",
        "self._size = run.context.world.size; self._number = run.context.world.rank",
        "self._all = communicator",
        "self._all, self._device = communicator, device",
        "self._all = given",
        "self._all: Group | None = None",
        "self._all: dict[str, Communicator] = {}",
        "if device:\n            self._everybody = self.members",
    ],
)
def test_a_class_that_keeps_them_is_noticed(line: str) -> None:
    source = f"""
class Keeper:
    def __init__(self, run, communicator, device, given: Generation):
        {line}
"""
    assert len(list(attributes(source))) == 1


@pytest.mark.parametrize("field", ["rank: int", "all: tuple[Member, ...]", "group: object"])
def test_a_dataclass_that_keeps_them_is_noticed(field: str) -> None:
    assert list(attributes(f"@dataclass\nclass Keeper:\n    {field}\n"))


def test_a_class_that_asks_for_them_is_not_noticed() -> None:
    source = """
class Asker:
    communicator_of: Callable[[], Communicator]

    def __init__(self, run: Run, communicator: Callable[[], Communicator]):
        self._run, self._connected = run, communicator
        self._rank_and_size: Callable[[], tuple[int, int]] = run.rank_and_size

    def use(self, group: Group):
        rank = group.rank
        self._run.context.world.describe(rank)
"""
    assert not list(attributes(source))
