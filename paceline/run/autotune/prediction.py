"""Prediction of a step's time for each exchange that a run could use, from its first steps.

    layers' times (rank 0's)  ─┐
    each candidate's buckets  ─┼─▶ `step_schedule` ─▶ seconds a step ─▶ all ranks
    seconds a byte of a sum   ─┘

By puts what is read soonest is sent first, and by collectives what is complete first. What an
exchange takes of the processor, which computes meanwhile, makes the computation slower: a time a
bucket, and with collectives, which copy gradients into buckets and back, a time a byte. It costs
nothing where the step waits for the link anyway.

The seconds a byte are those of a collective. Between machines, puts send fewer bytes: one copy a
machine, where a ring has one a rank, and no zeros of embeddings' gradients. On one machine they use
shared memory and are faster than predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from paceline.codecs.codecs import CODECS
from paceline.comm.communicator import broadcast_state
from paceline.comm.link_speed import seconds_per_byte
from paceline.config.world import SyncConfig
from paceline.errors import Message
from paceline.generation.run import Run
from paceline.reduce.buckets import mostly_tables, partition
from paceline.reduce.put_engine.zero_suppression import MAX_NONZERO_SHARE
from paceline.replica.compiled_modules import is_compiled, visible_modules
from paceline.replica.replica import Replica
from paceline.replica.trained_parameters import TrainedParameters, table_parameters
from paceline.run.autotune.inexact import inexact_note
from paceline.run.autotune.pass_times import PassTimes
from paceline.run.autotune.server_proposal import ServerProposal
from paceline.run.autotune.step_schedule import Profile, seconds_by_urgency, seconds_in_order

# The processor's work, a core of an AMD EPYC a rank.
_BUCKET_SECONDS = 7e-4  # by benchmarks/buckets.py --links 1gbit --wires int8
_COPY_SECONDS = 5e-10  # a byte, by benchmarks/floor.py --links loopback
_BLOCK = 2**16  # values, by which a codec's bytes a value are computed


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What determines how long bytes take.

    Attributes:
        seconds_per_byte: of a sum of unencoded gradients over all ranks, by a collective.
        workers_per_machine: for each machine, its number of ranks.
        nonzero: for each table, the share of the rows of a rank's gradient that aren't zero.
    """

    seconds_per_byte: float
    workers_per_machine: Sequence[int]
    nonzero: Mapping[Tensor, float]

    def by_puts(self, config: SyncConfig) -> float:
        """Return the seconds that a byte of gradients takes by puts."""
        ranks = sum(self.workers_per_machine)
        machines = len(self.workers_per_machine)
        seconds = self.seconds_per_byte
        codec = CODECS[config.wire]
        if codec is not None:
            seconds *= codec.size(_BLOCK) / (4 * _BLOCK)
        if machines > 1:
            seconds *= (machines - 1) / machines * ranks / (ranks - 1)
        return seconds

    @property
    def by_server(self) -> float:
        """The seconds for which a byte of each rank's gradients occupies the port of one server.

        A ring sends 2 (ranks - 1) / ranks bytes a byte through each port, and ranks send one each
        to a server.
        """
        ranks = sum(self.workers_per_machine)
        return self.seconds_per_byte * ranks**2 / (2 * (ranks - 1))

    def sent_share(self, table: Tensor, config: SyncConfig) -> float:
        """Return the share of a table's bytes that is sent by puts between machines.

        A machine's contribution has the rows of its ranks, and a sum those of all ranks. A row is
        taken as whole blocks; of narrower ones more is sent.
        """
        zero = 1 - self.nonzero.get(table, 1.0)
        contributed = 1 - zero ** max(self.workers_per_machine)
        summed = 1 - zero ** sum(self.workers_per_machine)
        if config.update == "sharded":
            summed = 1.0  # parameters return
        shares = (1.0 if share > MAX_NONZERO_SHARE else share for share in (contributed, summed))
        return sum(shares) / 2


class StepPredictor:
    """Predictor of a replica's steps, by the times of its model's passes.

    Args:
        candidates: the exchanges.
        run: the run, whose ranks exchange.
        proposal: of a server, which learns for how long bytes occupy its port; None: there is none.

    Attributes:
        note: after `predict`, on rank 0: what exchanges that aren't exact would gain; None: little.
    """

    def __init__(
        self,
        candidates: Sequence[SyncConfig],
        model: nn.Module,
        run: Run,
        proposal: ServerProposal | None = None,
    ) -> None:
        self._proposal = proposal
        self._candidates = candidates
        self._model = model
        self._run = run
        self.note: Message | None = None
        self._times: PassTimes | None = None
        self._seen: TrainedParameters | None = None
        self._replica: Replica | None = None  # None until `watch`

    def watch(self, replica: Replica) -> None:
        """Predict the steps of a replica, until it is closed."""
        self._replica = replica
        replica.on_close(self.restart)

    def begin_step(self) -> None:
        """Begin a step; from the first one on they are measured."""
        replica = self._replica
        assert replica is not None
        if self._times is None and replica.reads is not None:
            if any(is_compiled(module) for module in visible_modules(self._model)):
                return
            replica.settle()
            self._seen = replica.trained()
            parameters = [p for p in self._seen.names if _is_exchanged(p, self._seen)]
            tables = table_parameters(self._model)
            timeline = self._run.timeline
            self._times = PassTimes(self._model, replica.reads, parameters, tables, timeline)
        if self._times is not None:
            self._times.begin_step(reduced=replica.reduced)

    def predict(self) -> list[float] | None:
        """Return predicted seconds a step by candidate, rank 0's; None if it can't; collective.

        The exchange of the last step ends before the link is measured.
        """
        replica = self._replica
        assert replica is not None
        context = self._run.context
        replica.settle()
        profile = None if self._times is None else self._times.profile()
        traffic = Traffic(
            seconds_per_byte=seconds_per_byte(context.group("all", "steps")),
            workers_per_machine=context.world.generation.workers_per_machine,
            nonzero={} if self._times is None else self._times.nonzero,
        )
        seen = self._seen
        seconds = None
        same = seen is not None and seen.fingerprint == replica.trained().fingerprint
        if same and profile is not None and seen is not None and profile.nbytes:
            seconds = [predicted_seconds(c, profile, seen, traffic) for c in self._candidates]
            several = context.world.size > 1
            # Stale workers can't reduce.
            if self._proposal is not None and several and not profile.reduces:
                self._proposal.port_ms = 1000 * profile.nbytes * traffic.by_server
            if len(traffic.workers_per_machine) > 1:
                self._note(seconds, profile, seen, traffic)
        self.restart()
        what = "the broadcast of predicted step times"
        found: list[float] | None = broadcast_state(context.group("all", "steps"), seconds, what)
        return found

    def _note(
        self,
        seconds: Sequence[float],
        profile: Profile,
        trained: TrainedParameters,
        traffic: Traffic,
    ) -> None:
        fastest = min(range(len(seconds)), key=seconds.__getitem__)
        config = self._candidates[fastest]
        self.note = inexact_note(
            config,
            seconds[fastest],
            profile.compute,
            lambda other: predicted_seconds(other, profile, trained, traffic),
            profile.nbytes * traffic.by_puts(config),
        )

    def restart(self) -> None:
        """Remove the hooks, and forget what was measured."""
        if self._times is not None:
            self._times.close()
        self._times = self._seen = None


def predicted_seconds(
    config: SyncConfig, profile: Profile, trained: TrainedParameters, traffic: Traffic
) -> float:
    """Return the predicted seconds of a step.

    Args:
        config: the exchange.
        profile: the step's computation.
        trained: the parameters of the profile, in its order; of row-sparse ones it has none.
        traffic: how long bytes take.
    """
    exchanged = [p for p in trained.names if _is_exchanged(p, trained)]
    indices = {p: index for index, p in enumerate(exchanged)}
    size = config.bucket_bytes
    found = partition(trained.names, trained.groups, size, trained.row_sparse)
    dense = [bucket.parameters for bucket in found if not bucket.row_sparse]
    buckets = [[indices[p] for p in parameters] for parameters in dense]
    work = _BUCKET_SECONDS * len(buckets)
    if config.sync == "allreduce":
        profile = profile.beside(work + _COPY_SECONDS * profile.nbytes)
        return seconds_in_order(profile, buckets, traffic.seconds_per_byte)
    profile = profile.beside(work)
    times = list(profile.parameters)
    if len(traffic.workers_per_machine) > 1:
        for parameters in dense:
            if mostly_tables(parameters, traffic.nonzero):
                for p in set(parameters).intersection(traffic.nonzero):
                    one = times[indices[p]]
                    share = traffic.sent_share(p, config)
                    times[indices[p]] = replace(one, nbytes=round(one.nbytes * share))
    profile = replace(profile, parameters=tuple(times))
    return seconds_by_urgency(profile, buckets, traffic.by_puts(config))


def _is_exchanged(parameter: nn.Parameter, trained: TrainedParameters) -> bool:
    """Return whether a parameter is in a dense bucket."""
    listed = parameter in trained.groups and parameter not in trained.row_sparse
    return parameter.requires_grad and listed
