"""Command of the checker: `python -m tests.harness.membership.check [--schedules N] [--mutants]`.

Without `--mutants` it runs schedules of the protocol itself, and ends with status 1 at a violation.
With it, it counts the schedules until each mutant is found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable

from tests.harness.membership.mutants import MUTANTS, Mutant
from tests.harness.membership.oracle import Violation
from tests.harness.membership.schedules import run_schedule


def found_by(mutant: Mutant, seeds: Iterable[int]) -> int | None:
    """Return the first seed whose schedule finds a mutant by its own violation; None: none does."""
    with mutant.applied() as faults:
        for seed in seeds:
            try:
                run_schedule(seed, faults)
            except Violation as violation:
                if str(violation) == mutant.breaks:
                    return seed
    return None


def check_mutants(seeds: range) -> bool:
    """Print when each mutant is found; return whether all are."""
    all_found = True
    for name, mutant in MUTANTS.items():
        seed = found_by(mutant, seeds)
        found = "not found" if seed is None else f"{seed - seeds.start + 1:,}"
        print(f"{name:52} {mutant.breaks:40} {found:>10}", flush=True)
        all_found &= seed is not None
    return all_found


def check_protocol(seeds: range) -> bool:
    """Run schedules and print what happened in them; return whether none broke the protocol."""
    violations, begun = 0, time.process_time()
    seen = Counter[str]()
    for seed in seeds:
        try:
            outcome = run_schedule(seed)
        except Violation as violation:
            violations += 1
            print(f"schedule {seed}: {violation}", flush=True)
            continue
        seen += outcome.happened
        seen["schedules that must go on"] += outcome.promised
    seconds = time.process_time() - begun
    print(f"{len(seeds):,} schedules, {violations:,} violations, {seconds:,.0f} processor seconds")
    print(", ".join(f"{count:,} {name}" for name, count in seen.items()))
    return not violations


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000, help="how many are run")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--mutants", action="store_true", help="look for the mutants")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.schedules)
    return 0 if (check_mutants if options.mutants else check_protocol)(seeds) else 1


if __name__ == "__main__":
    sys.exit(main())
