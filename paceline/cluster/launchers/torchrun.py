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
    read_integer,
    read_numbers,
    read_port,
    require,
)

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def read_torchrun(variables: Mapping[str, str]) -> LaunchedProcess:
    """Read rank, world size, local rank, the machine's number and the TCP store's address.

    Raises:
        ConfigError: the variables contradict each other, or some are missing; names them.
    """
    process = read_numbers(variables, "torchrun", "torchrun", _NAMES)
    require(variables, ("GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"), "torchrun")
    run = variables.get("TORCHELASTIC_RUN_ID", "by-hand")
    return replace(
        process,
        node=read_integer(variables, "GROUP_RANK"),
        launch_id=f"torchrun-{run}.{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        master=f"{variables['MASTER_ADDR']}:{read_port(variables, 'MASTER_PORT')}",
        launcher_serves_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
