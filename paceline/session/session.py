"""Session: what a process does from opening a run to its end, for the command and for scripts.

connect    the others of the run: membership, and the first generation
resume     the newest checkpoint of all machines
record     event file, trace, trackers
replicate  models and optimizers → what exchanges them
bind       these → the steps of the run
begin      votes on later generations
rescue     the newest state in memory → a file, after a signal or an error
leave      the peers learn that this process ends, and why
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from paceline.cluster.membership.elastic import join_membership
from paceline.cluster.membership.evidence import EvidenceOptions
from paceline.cluster.membership.generation import Group
from paceline.cluster.membership.protocol import Membership
from paceline.cluster.membership.static import watch_peers
from paceline.cluster.print_message import print_message
from paceline.cluster.rendezvous.preflight import compare
from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.supervision.requests.run_presence import RunPresence
from paceline.cluster.supervision.requests.run_status import RunStatus
from paceline.cluster.supervision.stop_signals import StopSignals
from paceline.cluster.supervision.supervisor import save_after, saved_sentence
from paceline.cluster.supervision.worker import declare_survivable
from paceline.config.run import OutputConfig
from paceline.config.world import SyncConfig
from paceline.errors import ServerLost
from paceline.generation.notes import Notes
from paceline.generation.run import Run
from paceline.observe.cost.cost_meter import CostMeter
from paceline.observe.event_file import EventFile
from paceline.observe.leader_recorder import LeaderRecorder
from paceline.observe.loss_history import LossHistory
from paceline.observe.speed_recorder import SpeedRecorder
from paceline.recorder import MemberRecorder, Recorder, Recorders
from paceline.replica.group import AnyReplica
from paceline.replica.replica import Replica
from paceline.run.autotune.autotuner import TrialSetting
from paceline.run.autotune.server_proposal import ServerProposal
from paceline.run.extension import Extension
from paceline.run.run_cost import RunCost
from paceline.run.steps import Steps
from paceline.run.straggler import RanksApart
from paceline.run.worker_speeds import WorkerSpeeds
from paceline.session.connect import connect_run
from paceline.session.resume.durable_start import DurableStart
from paceline.session.resume.edits import GIVEN
from paceline.session.resume.start import Start, find_start, own_part_name
from paceline.session.training import Training
from paceline.snapshots.backup import SnapshotBackup
from paceline.snapshots.division import wants_division
from paceline.snapshots.durable_files import DurableFiles
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.position import Position
from paceline.snapshots.schedule import SavePolicy
from paceline.snapshots.step_snapshots import StepSnapshots
from paceline.state.checkpoint_files import Checkpoints
from paceline.state.checkpoint_parts import CheckpointParts, part_names
from paceline.state.checkpoint_writer import CheckpointWriter, WrittenFiles
from paceline.timeline.trace import Trace
from paceline.wiring.average import average_weights
from paceline.wiring.connections import refuse_divided
from paceline.wiring.exchange import replicate, replicate_grouped
from paceline.wiring.pairs import Pair

_TERMINATED = 143  # the status where another process received the signal


@dataclass(kw_only=True, eq=False)
class Session:
    """Session of one process: from the connections with its peers to the end of the run.

    Attributes:
        device: where this process computes.
        timeouts: in seconds: one for the start and the first step, one for later operations.
        silence: limits of silence, after which a peer counts as lost.
        survives: whether the others continue where a process is lost. Otherwise a launcher ends all
            of them, and each only learns what the others do.
        folder: the run's, on this machine; None: nothing is written.
        output: when to save checkpoints, and from which one to resume.
        identity: what distinguishes this run from another, whose checkpoints are skipped.
        seed: seed of the sample order and of each step's random streams.
        signals: requests to stop; where the run survives losses, they end it on all machines.
        notes: phrases and shows what the user is to know.
        resources: closes what the session opens, in reverse order of opening.
        run: the run, whose generation names the witness if there is one.
        start: where the run resumes; without the checkpoint from the first step on.
        position: the run's position, which each step advances.
        bound: closes what binds the models; each further call of `replicate` closes it, too.
        backup: exchanges backups of snapshots; None: no loss is survived.
        meter: measures what this process costs; None: nothing does.
        steps: the steps of the models; None: there is no model yet.
        speeds: measures the ranks' speeds in them; None: nothing does.
        total_steps: the number of the run's steps; None: it isn't known.
    """

    device: torch.device
    timeouts: tuple[float, float]
    silence: EvidenceOptions
    survives: bool
    folder: Path | None
    output: OutputConfig
    identity: Mapping[str, object]
    seed: int
    signals: StopSignals
    notes: Notes
    resources: ExitStack
    run: Run = field(init=False)
    start: Start = field(default_factory=Start, init=False)
    position: Position = field(default_factory=Position, init=False)
    bound: ExitStack = field(default_factory=ExitStack, init=False)
    backup: SnapshotBackup | None = field(default=None, init=False)
    meter: CostMeter | None = field(default=None, init=False)
    steps: Steps | None = field(default=None, init=False)
    speeds: WorkerSpeeds | None = field(default=None, init=False)
    total_steps: int | None = field(default=None, init=False)
    _proposal: ServerProposal = field(default_factory=ServerProposal, init=False)
    _speed: SpeedRecorder = field(default_factory=SpeedRecorder, init=False)
    _losses: LossHistory = field(init=False)
    _replicas: Sequence[Replica] = field(default=(), init=False)
    _writer: CheckpointWriter | None = field(default=None, init=False)
    _parts: CheckpointParts | None = field(default=None, init=False)

    def connect(self, group: Group, store: Store) -> None:
        """Connect this process with all others of its run; collective.

        Args:
            group: all ranks of the start, as this one sees them.
            store: the store of the start.

        Raises:
            CommError: a process didn't come in time, or can't be reached.
        """
        limit = self.timeouts[0]
        report = self.notes.print
        membership: Membership
        if self.survives:
            group, membership = join_membership(
                group,
                store,
                self.resources,
                self.signals,
                options=self.silence,
                limit=limit,
                report=report,
            )
        else:
            membership = watch_peers(
                group, store, self.resources, options=self.silence, limit=limit, report=report
            )
        run = connect_run(group, store, self.device, self.timeouts, membership, self.notes)
        self.run = self.resources.enter_context(run)

    def resume(self) -> None:
        """Find where the run resumes, on all machines; collective.

        Raises:
            PacelineError: as `find_start`.
        """
        if self.folder is not None:
            self.start_from(find_start(self.output, self.folder, self.identity, self.run))
            self.folder.mkdir(parents=True, exist_ok=True)  # on machines without rank 0

    def start_from(self, start: Start) -> None:
        """Continue from a starting point."""
        self.start = start
        self.position = start.position

    def record(self, leader: Callable[[], Sequence[Recorder]], *others: Recorder) -> None:
        """Record the run in its folder from now on, if it has one; then let models be bound.

        Args:
            leader: opens the recorders that this process has while it is the leader.
            others: receive all events, too.
        """
        run = self.run
        if self.folder is not None:
            self._losses = LossHistory(run)
            recorders = Recorders(
                EventFile(self.folder, run.context.world.member.id, run.membership),
                *others,
                LeaderRecorder(run, leader),
                self._speed,
                self._losses,
                *self._open_trace(self.folder),
            )
            run.recorder = MemberRecorder(recorders, run.membership)
        self.resources.callback(run.recorder.close)
        self.open_bindings()

    def open_bindings(self) -> None:
        """Let models be bound, with backups on other members where the run survives losses."""
        self.resources.enter_context(self.bound)
        if self.run.membership.survives:
            self.backup = SnapshotBackup(self.run.membership)
            self.resources.callback(self.backup.close)

    def agree(self, subject: str, facts: Mapping[str, object], axis: str = "all") -> None:
        """Require the same facts on all ranks along an axis; collective, once per subject.

        Raises:
            ConfigError: two ranks differ; names both values.
            CommError: a rank is late, or the run has ended.
        """
        store = self.run.store
        context = self.run.context
        assert store is not None
        compare(
            store,
            context.along(axis),
            subject,
            {name: str(value) for name, value in facts.items()},
            timeout=self.timeouts[0],
            activities=context.activities,
        )

    def answer_requests(self) -> None:
        """Answer `paceline status` and `paceline stop` from now on, if the run has a folder."""
        if self.folder is not None:
            member = self.run.context.world.member
            presence = RunPresence.of_member(self.folder, member, report=self._status)
            self.resources.callback(presence.close)

    def replicate(self, pairs: Sequence[Pair]) -> Sequence[Replica]:
        """Bind pairs of a model and an optimizer, those of earlier calls with them; collective.

        Args:
            pairs: the earlier ones first; their replicas are closed.

        Returns:
            the replica of each pair.

        Raises:
            ConfigError: a model or optimizer can't be exchanged.
            CommError: a peer was lost, or silent.
        """
        for pair in pairs:
            refuse_divided(pair.config.sync, self.run.context.mesh)
        known = len(self._replicas)
        for replica in self._replicas:
            replica.drain()
        self.bound.close()
        if len(pairs) == 1:
            self._replicas = [self._replicate(pairs[0])]
        else:
            self._replicas = []
            for index, pair in enumerate(pairs):
                config = self.start.keep_bucket_size(pair.config, index)
                grouped = replicate_grouped(pair, index, self.run, config)
                self.bound.callback(grouped.close)
                self._replicas.append(grouped)
        for index, replica in enumerate(self._replicas):
            for note in self.start.restore_exchange(replica, index):
                if index >= known:
                    self.run.note(note, shown=self.run.leads)
        return self._replicas

    def worker_speeds(self, config: SyncConfig) -> WorkerSpeeds:
        """Make what measures the ranks' speeds, by which an exchange may divide the batches."""
        return WorkerSpeeds(
            self.run,
            self.position,
            measured=config.measures_shares,
            # A script that didn't ask for measured shares isn't refused because it counts its
            # samples itself, or accumulates over a short batch: its shares stay equal.
            usual_only=config.shares != "measured",
            proposal=self._proposal if config.sync == "auto" else None,
        )

    def bind(
        self,
        training: Training,
        speeds: WorkerSpeeds,
        *,
        constant: Mapping[str, Any] | None = None,
        extensions: Sequence[Extension] = (),
    ) -> Steps:
        """Make steps of these models from now on, saved as the run's output says.

        Args:
            training: the models, with the replicas that `replicate` has returned.
            speeds: measures the ranks' speeds, where the exchange lets them be known.
            constant: entries of all checkpoint files, besides those of every run.
            extensions: what else these steps do, besides what those of every run do.
        """
        output = self.output
        if self.folder is not None and self._writer is None:
            self._writer = self._open_writer(self.folder, constant or {})
        snapshots = StepSnapshots(
            self.run,
            training.replica,
            training.objects,
            enabled=output.snapshots,
            interval=self.position.snapshot_interval,
            limit_mb=output.snapshot_memory_mb,
            check=output.replica_check,
            backup=self.backup,
            divides=self._divides(training.objects),
            report=self.run.note,
        )
        # Workers that average don't wait in each step; a GPU's waits aren't measured.
        waits = training.replica.rounds is None and self.device.type == "cpu"
        self.speeds = speeds if waits else None
        self.steps = Steps(
            training.replica,
            self.run,
            self._writer,
            seed=self.seed,
            position=self.position,
            policy=SavePolicy(steps=output.checkpoint_steps, minutes=output.checkpoint_minutes),
            requests=self.signals,
            snapshots=snapshots,
            durable=self._durable_start(training),
            parts=self._parts,
            extensions=[*extensions, *self._extensions(training.replica)],
        )
        return self.steps

    def _extensions(self, replica: AnyReplica) -> list[Extension]:
        """Make the extensions of each run's steps."""
        measured = self.speeds is not None and self.speeds.measured
        made: list[Extension] = [RanksApart(self.run, replica, measured=measured)]
        if self.speeds is not None:
            made.append(self.speeds)
        if self.meter is not None:
            made.append(RunCost(self.run, self.position, self.meter, self.output.price_per_hour))
        return made

    def _divides(self, objects: StateObjects) -> bool:
        """Return whether to divide snapshots, by the output's setting and this machine's memory."""
        machines = [member.machine for member in self.run.context.world.generation.members]
        workers = machines.count(self.run.context.world.member.machine)
        weights = sum(p.nbytes for pair in objects.pairs for p in pair.trained().names)
        return wants_division(self.output.snapshot_copies, weights, workers)

    def record_start(self, **fields: object) -> None:
        """Record that the first step begins; `fields` are those of the event `run`."""
        assert self.steps is not None
        self.steps.recovery.record_start(self.start.origin, **fields)
        self.start = replace(self.start, state=None)  # which the steps don't need

    def begin(self) -> None:
        """Take part in votes from now on, on the run's later generations.

        A note names the machine whose loss the run wouldn't survive, if any. The supervisor
        learns whether the others survive this process.
        """
        membership = self.run.membership
        if risk := membership.begin(self.run.context.world.generation):
            self.run.recorder.event("note", text=risk)
        if membership.survives:
            declare_survivable()

    def rescue(self, error: BaseException | None = None) -> str:
        """Save the newest state in memory, from any thread; return a sentence for the user, or "".

        Args:
            error: why the process ends; None: a signal.
        """
        if self.folder is None or self.steps is None:
            return ""
        context = self.run.context
        first_here = context.mesh.divided or context.world.local_rank == 0
        return save_after(error, self.folder, self.steps.rescue, first_here=first_here)

    @property
    def exit_status(self) -> int:
        """The status of a process that stopped because it, or another one, was asked to."""
        return self.signals.status or _TERMINATED

    def print_stopped(self) -> None:
        """Print, as the leader, where the state of a run that was stopped is saved."""
        if self.folder is not None and self.run.leads:
            print_message(saved_sentence(self.folder, self.position.number))

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the run; the peers learn why.

        Args:
            error: what ends this process; None: it has made all its steps, or was stopped.
        """
        membership = self.run.membership
        if error is None:
            self.run.context.activities.close()
            membership.leave()
        elif isinstance(error, ServerLost):  # on all workers: that this one ends is no loss
            membership.leave()
        else:
            membership.leave(FailureReport.of(error))

    def _open_trace(self, folder: Path) -> list[Trace]:
        """Make what traces the steps that are to be traced, if any; its file goes into `folder`."""
        steps = self.output.traced
        if steps is None:
            return []
        path = folder / f"trace.steps{steps[0]}-{steps[-1]}.json"
        machine = self.run.context.world.machine
        return [Trace(path, steps, self.run, machine)]

    def _replicate(self, pair: Pair) -> Replica:
        """Bind the only pair."""
        if pair.average is not None:
            replica = average_weights(
                pair.model, pair.optimizer, self.run, pair.config, pair.average, self.total_steps
            )
        else:
            remaining = None
            if self.total_steps is not None:
                remaining = self.total_steps - self.position.number
            replica = replicate(
                pair.model,
                pair.optimizer,
                self.run,
                self.start.keep_bucket_size(pair.config),
                pair.share,
                TrialSetting(folder=self.folder, steps=remaining),
                buffers=pair.buffers,
                proposal=self._proposal,
            )
        self.bound.callback(replica.close)  # also where an error or an interrupt follows
        return replica

    def _open_writer(self, folder: Path, constant: Mapping[str, Any]) -> CheckpointWriter:
        files: WrittenFiles | None = None
        if self.backup is not None:
            files = DurableFiles(self.run.membership.frames, self.backup, folder)
        given = self.start.given.entries
        context = self.run.context
        keep = self.output.keep_checkpoints
        part = own_part_name(context)
        checkpoints = Checkpoints(folder, keep)
        if part:
            parts = part_names(context.mesh.lengths)
            # Rank 0 may write the index of the newest complete one later than others know of it.
            checkpoints = Checkpoints(folder, max(keep, 2), part)
            files = self._parts = CheckpointParts(checkpoints, keep, parts, files)
            constant = {**constant, "part": part}
        return CheckpointWriter(
            checkpoints,
            constant={"config": self.identity, **constant, GIVEN: given},
            membership=self.run.membership,
            files=files,
            report=self.notes.show,
        )

    def _durable_start(self, training: Training) -> DurableStart | None:
        """Return what goes back to the durable state; None without a run folder."""
        if self.folder is None:
            return None
        return DurableStart(
            self.run,
            self.folder,
            self.output,
            self.identity,
            given=self.start.given,
            training=training,
        )

    def _status(self) -> RunStatus:
        return RunStatus.of(
            self.run.context.world.generation,
            self.position.number,
            total_steps=self.total_steps,
            samples_per_second=self._speed.samples_per_second(),
            losses=self._losses.losses,
        )
