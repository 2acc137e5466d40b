"""What `join` made of a process: its place, its peers, and where its run goes on and is kept."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from paceline.api.argument_names import as_arguments
from paceline.api.exit_handler import ExitHandler
from paceline.cluster.join import Joined
from paceline.cluster.rendezvous.preflight import compare
from paceline.cluster.supervision.stop_signals import StopSignals
from paceline.cluster.supervision.supervisor import saved_sentence, say
from paceline.comm.communicator import Communicator, until_end
from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.comm.single_rank import SingleRankCommunicator
from paceline.config.run import OutputConfig
from paceline.observe.trace.step_trace import Trace
from paceline.recorder import Recorder
from paceline.run.steps import SavePolicy
from paceline.state.checkpoint_files import Checkpoints
from paceline.state.checkpointer import Checkpointer, Stateful
from paceline.wiring.autotune import TrialSetting
from paceline.wiring.exchange import Peers
from paceline.wiring.machine_group import connect_machine


@dataclass(frozen=True, kw_only=True)
class Link:
    """How a process reaches its peers.

    Attributes:
        joined: the world.
        device: what its tensors live on.
        first_timeout: seconds to wait for peers at the start.
        timeout: seconds to wait for them afterwards.
    """

    joined: Joined
    device: torch.device
    first_timeout: float
    timeout: float

    def connect(self, purpose: str, resources: ExitStack) -> Communicator:
        """Connect with all ranks, once a purpose; collective.

        Args:
            purpose: what for.
            resources: closes the connections in the end, well or not.

        Raises:
            CommError: a rank didn't come in time.
        """
        communicator = self._connected(purpose)
        resources.enter_context(until_end(communicator))
        return communicator

    def connect_machine(self, sync: str, resources: ExitStack) -> Communicator | None:
        """Connect with the ranks of this machine, if its GPUs add up first; collective.

        Args:
            sync: the method that asks for it.
            resources: closes the connections in the end, well or not.

        Raises:
            CommError: a rank didn't come in time.
        """
        members, limits = self.joined.members, (self.first_timeout, self.timeout)
        intra_machine = connect_machine(members, self.joined.store, self.device, limits, sync)
        if intra_machine is not None:
            resources.enter_context(until_end(intra_machine))
        return intra_machine

    def agree(self, subject: str, facts: Mapping[str, object]) -> None:
        """Require the same facts of all ranks; collective, once a subject.

        Raises:
            ConfigError: two ranks differ; names both values.
            CommError: a rank didn't come in time, or the run has ended.
        """
        texts = {name: str(value) for name, value in facts.items()}
        joined = self.joined
        compare(joined.store, joined.members, subject, texts, timeout=self.first_timeout)

    def _connected(self, purpose: str) -> Communicator:
        members = self.joined.members
        if members.world_size == 1:
            return SingleRankCommunicator()
        return ProcessGroupCommunicator(
            PrefixStore(f"generation/{members.generation}/{purpose}", self.joined.store),
            rank=members.rank,
            world_size=members.world_size,
            device=self.device,
            address=members.address,
            first_timeout=self.first_timeout,
            timeout=self.timeout,
        )


@dataclass(frozen=True, kw_only=True)
class Session:
    """A process's part in a run.

    Attributes:
        link: its peers.
        communicator: connects them for steps.
        run: the run's folder, or None.
        output: when and what to save there.
        identity: what makes the run this one.
        recorder: receives its events.
        trace: traces steps, where it is to.
        signals: those that ask it to stop.
        exit_handler: speaks if the script fails.
        resources: what is to be closed in the end.
    """

    link: Link
    communicator: Communicator
    run: Path | None
    output: OutputConfig
    identity: Mapping[str, Any]
    recorder: Recorder
    trace: Trace | None
    signals: StopSignals
    exit_handler: ExitHandler
    resources: ExitStack

    @property
    def policy(self) -> SavePolicy:
        """When checkpoints are due."""
        return SavePolicy(
            steps=self.output.checkpoint_steps, minutes=self.output.checkpoint_minutes
        )

    @property
    def peers(self) -> Peers:
        """The other processes, for what exchanges gradients."""
        joined = self.link.joined
        return Peers(
            members=joined.members,
            token=joined.token,
            limits=(self.link.first_timeout, self.link.timeout),
            communicator=self.communicator,
            device=self.link.device,
            recorder=self.recorder,
            trace=self.trace,
        )

    @property
    def setting(self) -> TrialSetting:
        """What the choice of an exchange has to go by; only the script knows how many steps."""
        return TrialSetting(folder=self.run, tell=self._tell)

    def checkpointer(self, parts: Mapping[str, Stateful]) -> Checkpointer | None:
        """Make what saves the state of `parts`, on rank 0 of a world with a run."""
        if self.run is None or self.communicator.rank > 0:
            return None
        checkpoints = Checkpoints(self.run, self.output.keep_checkpoints)
        return Checkpointer(parts, checkpoints, constant={"config": dict(self.identity)})

    def tell_saved(self) -> None:
        """Say where a stopped run goes on, where our supervisor says that it stops."""
        supervised = self.link.joined.launcher == "paceline"
        if supervised and self.run is not None and self.communicator.rank == 0:
            say(saved_sentence(self.run))

    def _tell(self, note: str) -> None:
        note = as_arguments(note)
        self.recorder.event("note", text=note)
        say(note)
