"""Undisturbed replays of runs that lost members: the same cuts, trained in threads of the test.

    the run       ranks 0, 1, 2 ── step 8 ──▶ rank 1 is killed ──▶ ranks 0, 2 from step 8 on
    its replay    ranks 0, 1, 2 ── step 8 ──▶ rank 1 hands its part over ──▶ ranks 0, 2

Nothing is lost in a replay, and it has no votes, backups or files of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from torch import Tensor

from tests.harness.equivalence.trainer_breaks import Moment
from tests.harness.equivalence.trainer_rollbacks import TrainerRollbacks
from tests.harness.processes import fault_runs
from tests.harness.processes.fault_runs import EPOCHS, TASK, Change, load

_MODELS = {
    "float64": ("--model", f"{fault_runs.__name__}:unobserved"),
    "float32": ("--model", f"{fault_runs.__name__}:unobserved_single"),
}


class FaultReplays:
    """Replays of the fault suite's runs; each is trained once.

    Args:
        folders: makes a folder for each.
    """

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._weights: dict[object, Mapping[str, Tensor]] = {}

    def weights(
        self,
        flags: Sequence[str],
        machines: Sequence[int],
        changes: Sequence[Change],
        *,
        dtype: str = "float64",
    ) -> Mapping[str, Tensor]:
        """Return the weights that a replay has left.

        Args:
            flags: of the exchange.
            machines: the number of workers of each machine.
            changes: of the run, in their order.
            dtype: of the model.
        """
        key = (tuple(flags), tuple(machines), tuple(changes), dtype)
        if key not in self._weights:
            self._weights[key] = self._train(*key)
        return self._weights[key]

    def _train(
        self,
        flags: tuple[str, ...],
        machines: tuple[int, ...],
        changes: tuple[Change, ...],
        dtype: str,
    ) -> Mapping[str, Tensor]:
        folder = self._folders.mktemp("replay") / "run"
        # Averaged weights have a snapshot at each round's end, all others need one here.
        moment = "forward" if "average" in flags else "between"
        moments: list[list[Moment]] = [[(each.start, moment)] * sum(machines) for each in changes]
        replay = TrainerRollbacks(
            folder,
            (*flags, *TASK, *_MODELS[dtype], "--num_epochs", str(EPOCHS)),
            machines,
            moments,
            [each.left for each in changes],
            to_holders=True,
            together="average" in flags,  # each worker trains a round's steps at its own pace
        )
        replay.run()
        assert replay.starts == [each.start for each in changes], replay.starts
        (path,) = folder.glob("*_model.pt")
        return load(path)
