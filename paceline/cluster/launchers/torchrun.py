"""Reader of the variables that torchrun sets.

Without torchrun's own TCP store (`TORCHELASTIC_USE_AGENT_STORE`), and where a user sets `RANK` and
the rest by hand, rank 0 serves one at `MASTER_ADDR` and `MASTER_PORT`.
See https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.cluster.launchers.launched_process import (
    LaunchedProcess,
    VariableNames,
    port_in,
    require,
    whole,
)

_NAMES = VariableNames(
    launcher="torchrun",
    command="torchrun",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
)


def by_torchrun(variables: Mapping[str, str]) -> bool:
    """Tell whether torchrun itself started this process."""
    return "TORCHELASTIC_RUN_ID" in variables


def by_hand(variables: Mapping[str, str]) -> bool:
    """Tell whether a user set torchrun's variables, or some of them."""
    return "RANK" in variables or "WORLD_SIZE" in variables


def read_torchrun(variables: Mapping[str, str]) -> LaunchedProcess:
    """Return the process's place.

    Raises:
        ConfigError: the variables contradict each other, or some are missing; names them.
    """
    place = _NAMES.read(variables)
    require(variables, ("GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"), "torchrun")
    run = variables.get("TORCHELASTIC_RUN_ID", "by-hand")
    return replace(
        place,
        node=whole(variables, "GROUP_RANK"),
        start=f"torchrun-{run}.{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        master=f"{variables['MASTER_ADDR']}:{port_in(variables, 'MASTER_PORT')}",
        serves=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
