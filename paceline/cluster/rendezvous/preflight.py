"""What all ranks must agree on before the first step; where they don't, both values are named.

    every rank posts its facts, which are names and short texts, and a digest of them
    every rank waits for all digests
    all errors name the lowest rank that differs from rank 0

All read the same entries and so come to the same verdict: none continues alone. What only one of
the two ranks has is named before what both have with different values.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata

from torch import Tensor
from torch._C._distributed_c10d import Store

from paceline.cluster.membership.generation import Generation, Group
from paceline.cluster.stores.waiting import await_keys
from paceline.comm.peer_activities import NO_PEERS, PeerActivities
from paceline.config.train import TrainConfig
from paceline.errors import ConfigError
from paceline.version import VERSION

_JOB_TOKEN = "job token"

_REMEDIES = {
    "configuration": "give all machines the same value",
    "versions": "install the same version on all machines",
    "data": "give all machines the same data set",
    "model": "build the same model on all ranks",
    _JOB_TOKEN: "start all processes as one run",
}


def compare(
    store: Store,
    group: Group,
    subject: str,
    facts: Mapping[str, str],
    *,
    timeout: float,
    activities: PeerActivities = NO_PEERS,
) -> None:
    """Require the same facts of all ranks; collective, once a subject.

    Args:
        store: the run's store.
        group: the ranks: all, or those along an axis.
        subject: what the facts are about.
        facts: names and short texts; a name that a rank doesn't have counts as "missing".
        timeout: seconds to wait for the others.
        activities: what the others do.

    Raises:
        ConfigError: two ranks differ; names the fact and both values; or a rank makes another call.
        CommTimeout: a rank didn't post its facts in time; names it.
        PeerLost: another process gave a reason for the run's end.
    """
    text = json.dumps(dict(facts))  # in their order: the first name that differs is the first here
    # Ranks with different tokens have different prefixes, and would not find each other's keys.
    within = "" if subject == _JOB_TOKEN else f"{group.generation.key_prefix}/"
    prefix = f"{within}preflight/{subject}"
    own = group.ranks[group.rank]  # in the generation: other groups compare the same subject
    store.set(f"{prefix}/facts/{own}", text)
    # All ranks read the digests, which are short; the
    # facts of two ranks are read where they differ.
    store.set(f"{prefix}/digest/{own}", hashlib.sha256(text.encode()).hexdigest())
    keys = [f"{prefix}/digest/{rank}" for rank in group.ranks]

    def make_timeout_message(missing: list[str]) -> str:
        ranks = ", ".join(group.generation.describe(int(key.rpartition("/")[2])) for key in missing)
        # In paceline.loader(), a missing rank may never have called it.
        calls = "; all ranks must call paceline.loader(), not only rank 0"
        advice = "check its output" + (calls if subject.startswith("loader ") else "")
        return f"{ranks} didn't report its {subject} within {timeout:g} s: {advice}."

    await_keys(store, keys, timeout, make_timeout_message, activities)
    digests = store.multi_get(keys)
    leader = group.ranks[0]
    for rank, digest in zip(group.ranks, digests, strict=True):
        if digest != digests[0]:
            entries = store.multi_get([f"{prefix}/facts/{i}" for i in (leader, rank)])
            first, other = (json.loads(entry) for entry in entries)
            raise ConfigError(_difference(group.generation, subject, first, other, leader, rank))


def configuration_facts(config: TrainConfig) -> dict[str, str]:
    """Return the flags that make a run this run, and what all ranks do together besides."""
    besides = {
        "trace_steps": config.output.trace_steps,
        "shares": config.sync.shares,
        "average_through": config.average.average_through,
        "average_server": config.average.average_server,
        "num_servers": config.sync.num_servers,
        "parameter_servers": config.sync.parameter_servers,
    }
    options = config.identity() | besides
    return {f"--{name}": str(value) or "not given" for name, value in sorted(options.items())}


def version_facts() -> dict[str, str]:
    """Return the versions of what computes."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "paceline": VERSION, "torch": metadata.version("torch")}


def data_facts(flag: str, records: int, fingerprint: str) -> dict[str, str]:
    """Return what identifies a data set.

    Args:
        flag: the flag that names the data set.
        fingerprint: equal for equal data sets.
    """
    return {f"--{flag}'s number of records": str(records), f"--{flag}'s fingerprint": fingerprint}


def model_facts(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the shape and type of a model's parameters and buffers, by their names.

    Their order is a fact of its own: gradients travel in it, without their names.
    """
    facts = {
        f"the model's {name}": f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in tensors
    }
    order = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    return {**facts, "the order of the model's parameters (digest)": order}


def token_facts(token: str) -> dict[str, str]:
    """Return what identifies a job token, not the token."""
    digest = hashlib.sha256(f"paceline preflight {token}".encode()).hexdigest()
    return {"the job token's digest": digest[:16]}


def _difference(
    generation: Generation,
    subject: str,
    first: dict[str, str],
    other: dict[str, str],
    *ranks: int,
) -> str:
    names = [*first, *(name for name in other if name not in first)]
    missing = (n for n in names if n not in first or n not in other)
    name = next(missing, None) or next(n for n in names if first[n] != other[n])
    hosts = [f"rank {r} ({generation.members[r].host})" for r in ranks]
    return (
        f"{name} is {first.get(name, 'missing')} on {hosts[0]} and {other.get(name, 'missing')} on "
        f"{hosts[1]}: {_REMEDIES.get(subject, 'they must be the same')}."
    )
