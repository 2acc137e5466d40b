"""A survivor whose only peer is lost again and again, and replaced by a member that joins.

Survivor and peers are threads of this process, with real control lines, votes and connections. The
survivor's proposal contains the next peer as a joiner, which holds what the survivor has
acknowledged; its copy of the start is handed over once the vote has decided:

    generation 0    survivor, peer 0
    generation 1    survivor, peer 1       peer 0 is lost in its step `LAST`
    …

    python -m tests.harness.membership.replaced_peers FOLDER LOSSES --sync …

prints a JSON object a generation: what the process has then. Of its memory, malloc has one arena:
with an arena a thread, freed memory is scattered over those of ended threads.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from paceline.cli.flags import parse
from paceline.cluster.membership import voting_member
from paceline.cluster.membership.acceptor_record import AcceptorRecord
from paceline.cluster.membership.control_line.frame_kinds import EXITED
from paceline.cluster.membership.elastic import ElasticMembership
from paceline.cluster.membership.evidence import EvidenceOptions
from paceline.cluster.membership.generation import Generation, Group, Member
from paceline.cluster.membership.machine_acceptor import MachineAcceptor
from paceline.cluster.membership.member_watch import MemberWatch
from paceline.cluster.membership.protocol import Successor
from paceline.cluster.membership.voting.messages import Held
from paceline.cluster.membership.voting.successor import Joiner, View
from paceline.cluster.membership.voting_member import VotingMember
from paceline.config.train import TrainConfig
from paceline.errors import CommError
from paceline.observe.cost.cost_meter import CostMeter
from paceline.replica.live_hooks import patch
from paceline.session.command_trainer import build_trainer
from paceline.session.connect import connect_run
from paceline.session.recorders import record_training
from paceline.session.sources import open_sources
from paceline.trainer import Trainer
from tests.harness.equivalence.handed_snapshots import hold, state_of_all
from tests.harness.equivalence.memory_growth import Usage
from tests.harness.processes.sessions import session_of
from tests.harness.processes.worlds import world_of

LAST = 6  # the step of a generation in which its peer is lost
LIMIT = 60.0
_M_ARENA_MAX = -8  # of mallopt(3)
_CPU, _HERE = torch.device("cpu"), "127.0.0.1"
_WORDS = (
    *("--train_data", "null", "--epoch_size", "96", "--image_size", "16", "--augment", "none"),
    *("--num_labels", "10", "--batch_size", "12", "--base_learning_rate", "0.01"),
    *("--warmup_epochs", "0", "--num_epochs", "1000", "--decode_workers", "0", "--run_id", "run"),
    *("--model", "tests.harness.equivalence.trainer_rollbacks:single", "--num_workers", "2"),
)


class Ended(BaseException):
    """Exception that ends a member in mid-step, as a signal does."""


class JoinedWatch(MemberWatch):
    """Watch on the members, and on joiners, which hold what this member has acknowledged.

    Attributes:
        joiners: the members that want to join.
        holds: what this member has acknowledged.
    """

    joiners: Sequence[Member] = ()
    holds: tuple[Held, ...] = ()

    @property
    def view(self) -> View:
        joiners = tuple(Joiner(member=one, held=self.holds) for one in self.joiners)
        return replace(super().view, joiners=joiners)


class JoinedMember(VotingMember):
    """Voting member that proposes joiners.

    Attributes:
        watch: has the joiners.
    """

    def __init__(self, *args: Any, options: EvidenceOptions, **kwargs: Any) -> None:
        super().__init__(*args, options=options, **kwargs)
        self._watch = self.watch = JoinedWatch(self.id, options)  # before anything is watched

    def acknowledge(self, generation: Generation, held: tuple[Held, ...]) -> bool:
        acknowledged = super().acknowledge(generation, held)
        if acknowledged:
            self.watch.holds = held
        return acknowledged


class ReplacingMembership(ElasticMembership):
    """Membership of a participant, which enters a given generation as a joiner.

    Args:
        participant: the participant, whose run has the next peers.
        generation: the run's present generation.
    """

    def __init__(self, participant: Participant, generation: Generation) -> None:
        run = participant.peers
        super().__init__(participant.voter, generation, run.store)
        self._peers, self._joined = run, list[Successor]()

    def join(self, successor: Successor) -> None:
        """Let the next generation be this one, as a joiner."""
        self._generation = successor.group.generation
        self._joined.append(successor)

    def next_generation(self, lost: CommError) -> Successor:
        if self._joined:
            return self._joined.pop()
        return self._peers.replace_peer(super().next_generation(lost))


class Participant:
    """A member with its trainer.

    Args:
        run: what all members share.
        group: the group in which it begins: a generation, or itself alone.
        generation: the run's present generation.
    """

    def __init__(self, run: ReplacedPeers, group: Group, generation: Generation) -> None:
        self._run = self.peers = run
        self.member, self.steps = group.member, 0
        self.arrived, self.released = threading.Event(), threading.Event()
        acceptor = MachineAcceptor(AcceptorRecord.open(run.record.path), 0)
        with ExitStack() as stack:
            self.voter = JoinedMember(
                generation,
                self.member,
                secret=b"secret",
                acceptor=acceptor,
                options=EvidenceOptions(peer_timeout=LIMIT, timeout=LIMIT),
            )
            stack.callback(self.voter.close)
            self.membership = ReplacingMembership(self, generation)
            self._build(group, stack)
            self._stack = stack.pop_all()

    def _build(self, group: Group, stack: ExitStack) -> None:
        config = self._run.config
        sources = open_sources(config)
        stack.callback(sources.close)
        limits = (config.world.first_iter_timeout, config.world.timeout)
        self.run = connect_run(group, self._run.store, _CPU, limits, self.membership)
        stack.callback(lambda: self.run.context.abort())
        session = session_of(config, self.run, self._run.folder, stack)
        if self.member.id == self._run.survivor_id:
            record_training(config, session)
        else:
            session.meter = CostMeter(
                _CPU, supervised=False
            )  # as the survivor has: its sum is of all
            session.open_bindings()
        # A peer that joins later has no survivor to compare its model with.
        patch(session, "agree", lambda *_: None)
        self.trainer: Trainer = build_trainer(config, session, sources)
        hook = self.trainer.model.register_forward_pre_hook(lambda *_: self._begin_step())
        stack.callback(hook.remove)

    def _begin_step(self) -> None:
        self.steps += 1
        if self.steps == LAST:
            self._run.reach_last(self)

    def train(self) -> None:
        """Train from the first generation, until the member ends."""
        self.membership.begin(self.run.context.world.generation)
        self.trainer.steps.recovery.record_start(
            None, model="single", device="cpu", samples=96, steps=8, epochs=1000, batch=12
        )
        self.trainer.run()

    def train_from(self, successor: Successor, state: Any) -> None:
        """Enter a generation with a copy of its start, and train until the member ends."""
        steps, error = self.trainer.steps, CommError("joins the run.")
        assert successor.start is not None
        hold(steps._snapshots, successor.start, state)
        self.membership.join(successor)
        steps.recovery.leave_generation(error)
        steps.recovery.go_back(error)
        self.membership.begin(self.run.context.world.generation)
        self.trainer._run_epochs()

    def close(self) -> None:
        """End the connections, the control line's first, and release everything."""
        self.voter.line.close()
        self._stack.close()


class ReplacedPeers:
    """A run of a survivor and one peer after another.

    Args:
        folder: the run's folder, which exists.
        words: further flags of the run.
        losses: the number of losses.
        look: called in each generation, with its number, while both members are in step `LAST`.
    """

    def __init__(
        self, folder: Path, words: Sequence[str], losses: int, look: Callable[[int], None]
    ) -> None:
        self.folder, self._losses, self._look = folder, losses, look
        self.config = parse(TrainConfig, [*_WORDS, *words], prog="paceline train", description="")
        self.record, self.store = AcceptorRecord.make(), HashStore()
        first = world_of((2,)).generation
        self._generation = replace(first, token="first")
        self.survivor_id = first.members[0].id
        self._survivor: Participant | None = None
        self._peer: Participant | None = None
        self._thread: threading.Thread | None = None
        self._waiting: Participant | None = None  # the next peer
        self._numbers = iter(range(2, 10_000))

    def train(self) -> None:
        """Train through all losses; the survivor is this thread."""
        found: list[Participant] = []
        groups = [Group.world(self._generation, rank) for rank in range(2)]
        builder = threading.Thread(
            target=lambda: found.append(Participant(self, groups[1], self._generation))
        )
        builder.start()
        self._survivor = survivor = Participant(self, groups[0], self._generation)
        builder.join(LIMIT)
        self._peer = found.pop()
        self._connect(self._peer)
        self._start(self._peer.train)
        try:
            survivor.train()
        except Ended:
            self._end_peer()
        finally:
            survivor.close()
            self.record.close()

    def reach_last(self, member: Participant) -> None:
        """Look, once both members are in the last step of a generation; then end the peer."""
        assert self._survivor is not None
        assert self._peer is not None
        if member is self._peer:
            member.arrived.set()
            assert member.released.wait(LIMIT)
            raise Ended
        assert self._peer.arrived.wait(LIMIT)
        number, writer = self._generation.number, self._survivor.trainer.steps._writer
        assert writer is not None
        writer.wait()
        self._look(number)
        if number == self._losses:
            raise Ended
        self._prepare_joiner()
        self._peer.released.set()

    def replace_peer(self, successor: Successor) -> Successor:
        """Start the peer of the next generation, once the one before has ended."""
        assert self._survivor is not None
        assert self._waiting is not None
        self._end_peer()
        survivor, peer = self._survivor, self._waiting
        self._generation = generation = successor.group.generation
        assert [one.id for one in generation.members] == [survivor.member.id, peer.member.id]
        survivor.voter.watch.joiners, survivor.steps = (), 0
        assert successor.start is not None
        state = state_of_all(survivor.trainer.steps._snapshots, successor.start)
        joined = Successor(group=Group.world(generation, 1), start=successor.start)
        self._peer, self._waiting = peer, None
        self._start(lambda: peer.train_from(joined, state))
        return successor

    def _prepare_joiner(self) -> None:
        """Make the next peer, which waits outside of the world."""
        assert self._survivor is not None
        known = self._survivor.member
        member = replace(known, id=f"{known.id.rpartition('-')[0]}-{next(self._numbers)}")
        alone = Generation(number=0, token=f"{member.id} alone", members=(member,))
        self._waiting = Participant(self, Group.world(alone, 0), self._generation)
        self._connect(self._waiting)
        self._survivor.voter.watch.joiners = (member,)

    def _connect(self, peer: Participant) -> None:
        assert self._survivor is not None
        lines = [self._survivor.voter.line, peer.voter.line]
        lines[0].expect(peer.member.id, _HERE, lines[1].port)
        lines[1].expect(self.survivor_id, _HERE, lines[0].port)
        assert not lines[0].wait_connected([peer.member.id], LIMIT)
        assert not lines[1].wait_connected([self.survivor_id], LIMIT)

    def _start(self, train: Callable[[], None]) -> None:
        assert self._peer is not None
        peer, survivor = self._peer, self._survivor
        assert survivor is not None

        def target() -> None:
            try:
                train()
            except Ended:
                peer.close()
                exited = {"member": peer.member.id, "how": "was killed by SIGKILL"}
                own = survivor.voter
                own.line.post(lambda: own.received("supervisor/0", EXITED, exited, b""))

        self._thread = threading.Thread(target=target)
        self._thread.start()

    def _end_peer(self) -> None:
        """Wait for the end of the present peer, which is released, and of its threads."""
        assert self._peer is not None
        assert self._thread is not None
        self._peer.released.set()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()


def main(folder: str, losses: str, *words: str) -> None:
    """Print what this process has in each generation."""
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    torch.set_num_threads(1)
    voting_member._FORGET_S = 0.0  # after which connections to lost members are closed

    def look(number: int) -> None:
        print(json.dumps({"generation": number, **asdict(Usage.now())}), flush=True)

    ReplacedPeers(Path(folder), words, int(losses), look).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
