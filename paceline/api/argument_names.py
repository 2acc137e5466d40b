"""Sentences of the layers below speak of flags; in somebody's script they are arguments.

--run_id first: this run is alive …, or give another --run_id.
run first: this run is alive …, or give another run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import PacelineError, as_flag

_ARGUMENTS = {
    **{"run_id": "run", "output_dir": "run", "use_cpu": "join(device='cpu')"},
    **{
        name: name
        for name in (
            *("resume", "checkpoint_steps", "checkpoint_minutes", "keep_checkpoints", "seed"),
            *("first_iter_timeout", "timeout", "bucket_mb", "sync", "wire", "update"),
            *("transport", "connections", "trace_steps"),
        )
    },
}


def as_argument(option: str) -> str:
    """Call an option as `join` and `parallelize` do; one that they lack stays a flag."""
    return _ARGUMENTS.get(option, as_flag(option))


def as_arguments(sentence: str) -> str:
    """Write the flags in a sentence that `join` and `parallelize` have as their arguments."""
    return re.sub(r"--(\w+)", lambda flag: as_argument(flag[1]), sentence)


@contextmanager
def in_python() -> Iterator[None]:
    """Let the sentences of errors that leave the block speak of arguments."""
    try:
        yield
    except PacelineError as error:
        error.name_of = as_argument
        if error.args and isinstance(error.args[0], str):
            error.args = (as_arguments(error.args[0]), *error.args[1:])
        raise
