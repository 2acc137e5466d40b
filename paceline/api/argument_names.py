"""Renders a message's options as arguments of a script: `run` in place of `--run_id`.

--run_id first: this run was started with …; restore the former value, or give another --run_id.
run first: this run was started with …; restore the former value, or give another run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from paceline.cluster.print_message import print_message
from paceline.config.average import ARGUMENTS as AVERAGE_ARGUMENTS
from paceline.config.server import ARGUMENTS as SERVER_ARGUMENTS
from paceline.errors import Message, as_flag, options_named
from paceline.generation.notes import Notes

_ARGUMENTS = {
    **AVERAGE_ARGUMENTS,
    **SERVER_ARGUMENTS,
    **{"run_id": "run", "output_dir": "run", "use_cpu": "join(device='cpu')"},
    "reset_optimizer": "join(reset_optimizer=True)",
    **{
        name: name
        for name in (
            *("resume", "checkpoint_steps", "checkpoint_minutes", "keep_checkpoints", "seed"),
            *("first_iter_timeout", "timeout", "idle_timeout"),
            *("bucket_mb", "sync", "sync_bn", "wire", "update", "param_dtype"),
            *("transport", "connections", "trace_steps", "snapshots", "snapshot_memory_mb"),
            *("tracker", "shares", "mesh", "snapshot_copies", "cuts", "microbatches", "schedule"),
        )
    },
}


def as_argument(option: str) -> str:
    """Return the name of an option in a script; one that no function takes stays a flag."""
    return _ARGUMENTS.get(option, as_flag(option))


def as_arguments(sentence: str | Message) -> str:
    """Return a sentence with its options as arguments."""
    return sentence.render(as_argument) if isinstance(sentence, Message) else sentence


def print_message_for_scripts(note: str | Message) -> None:
    """Print a note on standard error, its options as arguments."""
    print_message(as_arguments(note))


class ScriptNotes(Notes):
    """Notes of a script: they name options as arguments, and are printed where they are made."""

    def text(self, note: str | Message) -> str:
        """Return a note as the user of a script reads it."""
        return as_arguments(note)

    def show(self, note: str | Message) -> None:
        """Print a note that is recorded as well."""
        self.print(note)


def errors_name_arguments() -> AbstractContextManager[None]:
    """Let errors that leave the block name options as arguments."""
    return options_named(as_argument)
