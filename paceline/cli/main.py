"""`paceline COMMAND`: one command a job. `resnet50_trainer` is `paceline train`."""

from __future__ import annotations

# Whatever is imported here is imported before Ctrl-C is heard: the least that there can be.
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module

from paceline.cli.garbage_collection import kept
from paceline.cli.streams import give_up, nobody_reads, open_closed
from paceline.errors import ConfigError, PacelineError

# A command's module is imported when it is called: `paceline db` needn't wait for torch.
COMMANDS = {
    "train": ("paceline.cli.train", "train a model on this machine, or on many"),
    "launch": ("paceline.cli.launch", "start workers of a command of your own"),
    "db": ("paceline.cli.db", "make a database of images; convert one; look into one"),
    "ledger": ("paceline.cli.ledger", "prove that a run trained each sample once"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        return _guarded(lambda: _tell(_usage(), 0 if words else 2))
    if words[0] in ("-V", "--version", "version"):
        return _guarded(_version)
    return _guarded(lambda: _command(words[0])(words[1:]))


def resnet50_trainer() -> int:
    """Run Caffe2's command."""
    return _guarded(lambda: _command("train")(sys.argv[1:], prog="resnet50_trainer"))


def _guarded(run: Callable[[], int]) -> int:
    """Turn errors into a sentence and a status."""
    open_closed()
    try:
        status = run()
        sys.stdout.flush()
        return status
    except PacelineError as error:
        return _fail(error, error.status)
    except KeyboardInterrupt:
        give_up()
        return 130
    except OSError as error:  # nobody below has a better word for it: a full disk
        if isinstance(error, BrokenPipeError) and nobody_reads():
            give_up()
            return 128 + signal.SIGPIPE
        return _fail(error, 1)


def _fail(error: Exception, status: int) -> int:
    with suppress(OSError):  # nobody reads it
        print(f"paceline: {error}", file=sys.stderr)
    give_up()
    return status


def _command(name: str) -> Callable[..., int]:
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}."
        raise ConfigError(f"no command {name!r}: {hint}")
    # Read as torch is loaded, see `cluster.environment`: threads wait asleep, and no warnings.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    module = COMMANDS[name][0]
    with _ended_by_ctrl_c(), nullcontext() if module in sys.modules else kept():
        command: Callable[..., int] = import_module(module).main
    return command


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once: libraries that are being imported may swallow it."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # somebody wants it otherwise
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _version() -> int:
    from importlib import metadata

    return _tell(f"paceline {metadata.version('paceline')}", 0)


def _tell(text: str, status: int) -> int:
    print(text)
    return status


def _usage() -> str:
    lines = [f"  {name:<8}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: paceline COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "paceline COMMAND --help tells a command's options, with examples.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
