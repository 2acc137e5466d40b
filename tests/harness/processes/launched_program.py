"""Program of a launcher's processes: joins the world, and obeys an order.

    sum             sum the ranks by Gloo, and write a file of facts about the world
    damage=1        rank 1 finds a damaged record, the others wait for a key that is never set
    late=1          the process that the launcher calls 1 never joins
    all mistaken    each finds the same mistake of the caller's
    wait            wait for a key that is never set

As a program: `launched_program.py LIMIT ORDER [FOLDER]`; the rendezvous is in the folder, if there
is one, and the program ends as the commands do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from paceline.cluster.environment import Environment, read_environment
from paceline.cluster.join import Joined, join_world
from paceline.cluster.stores.store_spec import StoreSpec, run_space
from paceline.errors import ConfigError, DataError, PacelineError
from tests.harness.processes.gloo_all_reduce import sum_of_ranks


def main(environment: Environment, limit: float, order: str, folder: str = "") -> int:
    """Join, obey and leave; return the exit status."""
    rendezvous = StoreSpec(kind="folder", address=folder, space=run_space("r")) if folder else None
    launched = environment.launched
    if launched is not None and order == f"late={launched.rank}":
        signal.pause()
    try:
        joined = join_world(
            environment, first_iter_timeout=limit, timeout=10, rendezvous=rendezvous
        )
    except PacelineError as error:
        print(f"not joined: {error}", flush=True)
        return error.status
    try:
        _obey(order, joined, limit)
    except Exception as error:
        status = joined.process_end.fail(error)
        sys.stderr.flush()
        os._exit(status)
    joined.process_end.close()
    return 0


def _obey(order: str, joined: Joined, limit: float) -> None:
    rank = joined.group.rank
    if order == "sum":
        Path(f"facts.{rank}.json").write_text(json.dumps(_facts(joined, limit)))
    elif order == "all mistaken":
        raise ConfigError("--seed -1: must be at least 0.")
    elif order == f"damage={rank}":
        raise DataError("record 7 is damaged.")
    else:
        print("waiting", flush=True)
        joined.await_all(["never"], "nobody said anything", limit)


def _facts(joined: Joined, limit: float) -> dict[str, object]:
    group = joined.group
    return {
        "launcher": joined.launcher,
        "rank": group.rank,
        "machine": group.machine,
        "machines": group.generation.workers_per_machine,
        "addresses": list(dict.fromkeys(m.address for m in group.generation.members)),
        "told": joined.from_rank_0("greeting", f"hello from rank {group.rank}", limit),
        "token": group.generation.token,
        "sum": sum_of_ranks(group, joined.store) if group.size > 1 else 0,
    }


if __name__ == "__main__":
    sys.exit(main(read_environment(), float(sys.argv[1]), *sys.argv[2:]))
