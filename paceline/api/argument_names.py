"""Sentences of the layers below speak of flags; in somebody's script they are arguments.

--run_id first: this run is alive …, or give another --run_id.
run first: this run is alive …, or give another run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import PacelineError

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


def as_arguments(sentence: str) -> str:
    """Write the flags in a sentence that `join` and `parallelize` have as their arguments."""
    return re.sub(r"--(\w+)", lambda flag: _ARGUMENTS.get(flag[1], flag[0]), sentence)


@contextmanager
def in_python() -> Iterator[None]:
    """Let the sentences of errors that leave the block speak of arguments."""
    try:
        yield
    except PacelineError as error:
        error.args = (as_arguments(str(error)), *error.args[1:])
        raise
