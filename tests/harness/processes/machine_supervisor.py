"""A program for each of several machines: a supervisor whose workers sum their ranks.

As a program: `machine_supervisor.py RUN_ID MACHINE MACHINES WORKERS FOLDER INTERFACES`.
"""

from __future__ import annotations

import sys

from torch._C._distributed_c10d import Store

from paceline.cluster.environment import read_environment
from paceline.cluster.membership.generation import Group
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.store_spec import StoreSpec, run_space
from paceline.cluster.supervision.supervisor import supervise
from paceline.cluster.supervision.worker import run_worker
from tests.harness.processes.gloo_all_reduce import sum_of_ranks


def work(group: Group, store: Store) -> None:
    total = sum_of_ranks(group, store)
    addresses = tuple(dict.fromkeys(m.address for m in group.generation.members))
    print(f"rank {group.rank} at {group.address} of {addresses}: {total}", flush=True)


def main() -> int:
    run_id, machine, machines, workers, folder, interfaces = sys.argv[1:]
    plan = RunPlan(
        run_id=run_id,
        machine=int(machine),
        machines=int(machines),
        workers=int(workers),
        rendezvous=StoreSpec(kind="folder", address=folder, space=run_space(run_id)),
        interfaces=tuple(interfaces.split()),
        first_iter_timeout=40.0,
        timeout=10.0,
    )
    return supervise(plan, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    worker_environment = read_environment().worker
    if worker_environment is None:
        sys.exit(main())
    run_worker(worker_environment, work)
