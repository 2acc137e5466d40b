"""`paceline COMMAND`: dispatches to the commands. `resnet50_trainer` is `paceline train`."""

from __future__ import annotations

# Ctrl-C has no handler during these imports, so there are as few as possible.
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module

from paceline.cli.garbage_collection import uncollected
from paceline.cli.streams import discard_unwritten, prepare_streams, reader_is_gone
from paceline.errors import ConfigError, PacelineError
from paceline.version import VERSION

# A command's module is imported when the command runs: `paceline db` needs no torch.
COMMANDS = {
    "train": ("paceline.cli.train", "train a model on one or more machines"),
    "launch": ("paceline.cli.launch", "run your own command in several worker processes"),
    "serve": (
        "paceline.cli.serve",
        "own a run's parameters, or merge its workers' weights",
    ),
    "evaluate": ("paceline.cli.evaluate", "score the model of a run on a database"),
    "predict": ("paceline.cli.predict", "classify images with the model of a run"),
    "export": ("paceline.cli.export", "write the model of a run for other programs"),
    "runs": ("paceline.cli.runs", "show the runs in a folder, and their results"),
    "compare": ("paceline.cli.compare", "show in what runs differ"),
    "plot": ("paceline.cli.plot", "plot the curves of runs"),
    "zoo": ("paceline.cli.zoo", "list models, their sizes and published accuracies"),
    "db": ("paceline.cli.db", "create, convert and inspect image databases"),
    "stop": ("paceline.cli.active_run.stop", "end a run on all its machines, and save its state"),
    "status": (
        "paceline.cli.active_run.status",
        "show a run's members, step, speed, lost workers",
    ),
    "ledger": ("paceline.cli.ledger", "verify that a run trained each sample exactly once"),
    "plan": ("paceline.cli.plan", "show the schedules of a pipeline, and which is the fastest"),
}
_USAGE = """\
usage: paceline COMMAND [OPTIONS]

{}

Run 'paceline COMMAND --help' for the options and examples of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    return _guarded(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def resnet50_trainer() -> int:
    """Run Caffe2's command."""
    return _guarded(lambda: _command("train")(sys.argv[1:], prog="resnet50_trainer"))


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<10}{what}" for name, (_, what) in COMMANDS.items())
        print(_USAGE.format(commands))
        return 0 if words else 2
    if words[0] in ("-V", "--version", "version"):
        print(f"paceline {VERSION}")
        return 0
    return _command(words[0])(words[1:])


def _guarded(run: Callable[[], int]) -> int:
    """Run a command; turn errors into a sentence and a status."""
    prepare_streams()
    try:
        status = run()
        sys.stdout.flush()
        return status
    except PacelineError as error:
        return _fail(error, error.status)
    except KeyboardInterrupt:
        discard_unwritten()
        return 130
    except OSError as error:  # without a sentence of its own: a full disk
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            discard_unwritten()
            return 128 + signal.SIGPIPE
        if error.errno != errno.ENOSPC:
            return _fail(error, 1)
        remedy = "free some space on it, then try again."
        return _fail(f"the disk is full ({error.strerror}): {remedy}", 1)


def _fail(said: Exception | str, status: int) -> int:
    with suppress(OSError):  # it has no reader
        print(f"paceline: {said}", file=sys.stderr)
    discard_unwritten()
    return status


def unknown_command(name: str, commands: Iterable[str]) -> ConfigError:
    """Return the error for a command that doesn't exist, with the nearest that does."""
    import difflib

    near = difflib.get_close_matches(name.split(" ")[-1], commands, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(commands)}."
    return ConfigError(f"no command {name!r}: {hint}")


def _command(name: str) -> Callable[..., int]:
    if name not in COMMANDS:
        raise unknown_command(name, COMMANDS)
    # torch reads these when it is loaded (`cluster.environment`): threads sleep while they wait.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    module = COMMANDS[name][0]
    with _ended_by_ctrl_c(), nullcontext() if module in sys.modules else uncollected():
        command: Callable[..., int] = import_module(module).main
    return command


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """End the process at once on Ctrl-C: libraries may swallow it during their import."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # the caller has a handler
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
